"""The CUDA device: its answers and sessions on a stand-in for ``torch.cuda``, and on a real GPU."""

from __future__ import annotations

import os

import pytest
import torch

from autobatch import DoesNotFitError, InputError
from autobatch.core.records import MemoryHolder
from autobatch.device import cuda_gpus, nvml
from autobatch.device.allocator.ledger import BudgetExceeded
from autobatch.device.base import Device
from autobatch.device.cuda import CudaDevice
from autobatch.device.cuda_gpus import visible_gpus
from autobatch.device.host import HostMemory
from autobatch.device.nvml import NvmlAbsent, NvmlGpu
from autobatch.device.oom import Verdict, classify
from tests.support.fake_cuda import FakeCuda, answer_nvml, gpu_reading

GIB, MIB = 1 << 30, 1 << 20


def test_the_budget_comes_from_the_gpu_with_that_uuid(fake: FakeCuda) -> None:
    device = CudaDevice(index=0, memory_budget=None)
    assert device.budget_bytes == 22 * GIB - int(1.2 * GIB)
    record = device.describe()
    assert (record.kind, record.name, record.total_bytes) == ("cuda", "Alpha", 24 * GIB)
    assert record.budget_source.startswith("20.0 GiB free (NVML) + 2.00 GiB held by this process")
    assert (device.torch_device, device.kind) == (torch.device("cuda:0"), "cuda")


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((6, 1), ("fp32",)),
        ((7, 0), ("fp32", "fp16")),
        ((7, 5), ("fp32", "fp16")),
        ((8, 0), ("bf16", "fp32")),
        ((12, 0), ("bf16", "fp32")),
    ],
)
def test_16_bits_only_on_gpus_that_are_built_for_them(
    fake: FakeCuda, capability: tuple[int, int], native: tuple[str, ...]
) -> None:
    fake.capability, fake.architectures = capability, []
    device = CudaDevice(index=0, memory_budget="6GiB")
    assert device.compute_capability == capability
    assert device.native_precisions() == native


def test_a_limit_of_the_process_limits_the_default_budget(fake: FakeCuda) -> None:
    fake.set_per_process_memory_fraction(0.5, 0)
    device = CudaDevice(index=0, memory_budget=None)
    assert device.budget_bytes == 12 * GIB - int(1.2 * GIB)
    assert (
        "10.0 GiB free (set_per_process_memory_fraction) + 2.00 GiB held" in device.describe().budget_source
    )
    assert CudaDevice(index=0, memory_budget="14GiB").budget_bytes == 14 * GIB


def test_the_gpu_is_the_current_one_in_its_sessions(fake: FakeCuda) -> None:
    """A tensor that a loss makes on ``cuda``, and an event, are then on the same GPU as the model."""
    device = CudaDevice(index=0, memory_budget="6GiB")
    assert fake.current == 7
    for session in (device.enforced, device.training):
        with session():
            assert fake.current == 0
        assert fake.current == 7


def test_cleaning_up_does_not_hide_the_error_that_lost_the_context(fake: FakeCuda) -> None:
    """After a device-side assert, also the restoring of the cap and the freeing of the cache fail."""
    device = CudaDevice(index=0, memory_budget="6GiB").expandable()
    error = RuntimeError("CUDA error: device-side assert triggered")
    error.add_note("raised by the workload: loss")

    def step() -> None:
        fake.lost = str(error)
        raise error

    with pytest.raises(RuntimeError) as caught, device.enforced():
        step()
    device.release()
    assert caught.value is error


def test_answers_that_are_the_same_for_every_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Device = CudaDevice(index=0, memory_budget="6GiB")
    assert device.reads_pinned_memory
    assert device.gains_from_compile
    assert device.optimizer_implementations() == ("default", "fused")
    assert device.allocator_config == device.new_allocator().config


@pytest.mark.parametrize(
    ("platform", "release", "integrated", "spills"),
    [
        ("linux", "6.8.0-generic", 0, False),
        ("linux", "5.15.167.4-microsoft-standard-WSL2", 0, True),
        ("win32", "11", 0, True),
        ("linux", "6.8.0-tegra", 1, True),
    ],
)
def test_only_drivers_of_windows_and_gpus_without_memory_of_their_own_spill(
    fake: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    release: str,
    integrated: int,
    spills: bool,
) -> None:
    """On Linux an allocation over the memory fails, and a size that is slow has another reason."""
    fake.integrated = integrated
    device = CudaDevice(index=0, memory_budget="6GiB")
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("platform.release", lambda: release)
    assert device.may_spill is spills


def test_a_full_gpu_leaves_no_budget(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.figures["reserved_bytes.all.current"] = 0
    answer_nvml(
        monkeypatch, lambda uuid: gpu_reading(GIB) if uuid == "GPU-a1" else NvmlAbsent(reason="no slice")
    )
    with pytest.raises(DoesNotFitError, match=r"1\.00 GiB free \(NVML\) .*--memory-budget"):
        CudaDevice(index=0, memory_budget=None)
    assert CudaDevice(index=0, memory_budget="6GiB").budget_bytes == 6 * GIB


def test_a_session_starts_empty_caps_and_restores_the_former_cap(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = 17 * GIB + 12_345
    fake.allowed = former
    # Freed workspaces are cached blocks, which the session must not start with.
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: fake.calls.append("clear"), raising=False
    )
    # Nor with pinned memory of the host that a larger micro-batch needed.
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: fake.calls.append("unpin"), raising=False)
    device = CudaDevice(index=0, memory_budget="6GiB")
    with device.enforced() as meter:
        assert fake.calls == ["clear", "unpin", "empty", f"allow {6 * GIB}", "reset"]
        meter.mark("forward")
        assert meter.phase == "forward"
    assert fake.allowed == former
    assert fake.calls.count("empty") == 1


def test_the_former_cap_is_restored_to_the_byte(fake: FakeCuda) -> None:
    fake.total = 25_282_281_472
    device = CudaDevice(index=0, memory_budget="50%")
    # Of these, a share that is read and set again as it stands would lose a byte.
    for former in (1_580_363_928, 1_580_376_275, 1_580_388_622):
        fake.allowed = former
        with device.training():
            assert fake.allowed == fake.total // 2
        assert fake.allowed == former


def test_the_former_cap_is_restored_after_an_error(fake: FakeCuda) -> None:
    device = CudaDevice(index=0, memory_budget="6GiB")

    def step() -> None:
        with device.training():
            assert fake.allowed == 6 * GIB
            raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        step()
    assert fake.allowed == 24 * GIB


def test_segments_are_expandable_inside_a_session_and_nowhere_else(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    read = "_accelerator_getAllocatorSettings"  # torch 2.12 and later
    monkeypatch.setattr(torch._C, read, lambda: settings[-1] if settings else "", raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    plain = CudaDevice(index=0, memory_budget="6GiB")
    device = plain.expandable()
    assert (plain.why_not_expandable(), device.why_not_expandable()) == (
        None,
        "segments are expandable already",
    )
    assert device.new_allocator().config.expandable_segments
    assert not plain.new_allocator().config.expandable_segments
    with plain.training():
        assert not settings
    for session in (device.training, device.enforced):
        settings.clear()
        with session():
            assert settings == ["expandable_segments:True"]
            assert fake.allowed == 6 * GIB
        assert settings == ["expandable_segments:True", "expandable_segments:False"]
        assert fake.allowed == 24 * GIB
    assert plain.why_not_expandable() is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (NvmlAbsent(reason="the NVIDIA driver is not loaded"), "the NVIDIA driver is not loaded"),
        (gpu_reading(None), "does not report free memory"),
        (gpu_reading(mig=True), "split by MIG"),
    ],
)
def test_the_driver_is_read_if_nvml_has_no_figures(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, answer: NvmlGpu | NvmlAbsent, words: str
) -> None:
    answer_nvml(monkeypatch, lambda uuid: answer if uuid == "GPU-a1" else NvmlAbsent(reason="no such slice"))
    fake.driver_free = 10 * GIB
    device = CudaDevice(index=0, memory_budget=None)
    assert device.budget_bytes == 12 * GIB - int(1.2 * GIB)
    record = device.describe()
    assert record.other_processes_bytes is None
    assert len(record.notes) == 1
    assert words in record.notes[0]
    assert "(the CUDA driver)" in record.budget_source


@pytest.mark.parametrize(
    ("less", "source", "words"),
    [
        (200 * MIB, "20.0 GiB free (NVML)", []),
        (12 * GIB, "8.00 GiB free (the CUDA driver)", ["NVML reports 20.0 GiB free, and the CUDA driver"]),
    ],
)
def test_a_limit_of_the_driver_counts_if_nvml_does_not_know_it(
    fake: FakeCuda, less: int, source: str, words: list[str]
) -> None:
    """A client of MPS may have a limit (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT), which NVML does not report."""
    fake.driver_free = 20 * GIB - less
    record = CudaDevice(index=0, memory_budget=None).describe()
    assert record.budget_source.startswith(source)
    told = [note for note in record.notes if note.startswith("NVML reports")]
    assert [said in note for note, said in zip(told, words, strict=True)] == [True] * len(words)


def test_unified_memory_is_counted_by_the_host(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostMemory(total_bytes=32 * GIB, available_bytes=12 * GIB, source="what /proc/meminfo says")
    monkeypatch.setattr(cuda_gpus, "host_memory", lambda: host)
    fake.integrated = 1
    device = CudaDevice(index=0, memory_budget=None)
    assert device.budget_bytes == 14 * GIB - int(1.2 * GIB)
    record = device.describe()
    assert (record.notes, record.other_processes_bytes) == (["the GPU shares the host's memory"], None)
    assert "12.0 GiB free (what /proc/meminfo says)" in record.budget_source
    monkeypatch.setattr(cuda_gpus, "host_memory", lambda: host._replace(available_bytes=None))
    assert "free (NVML)" in CudaDevice(index=0, memory_budget=None).describe().budget_source


def test_others_are_counted_without_this_process(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.figures["reserved_bytes.all.current"] = 0

    def read(uuid: str) -> NvmlGpu:
        context = 512 * MIB if fake.initialized else 0
        return gpu_reading(24 * GIB - 3 * GIB - context - fake.figures["reserved_bytes.all.current"])

    answer_nvml(monkeypatch, read)
    # In a container an id may be that of another process of the host, which holds less than this one.
    holders = [MemoryHolder(pid=pid, name=None, used_bytes=GIB) for pid in (os.getpid(), 1)]
    monkeypatch.setattr(nvml, "read_holders", lambda uuid: holders)
    device = CudaDevice(index=0, memory_budget="6GiB")
    fake.figures["reserved_bytes.all.current"] = 2 * GIB
    record = device.describe()
    assert (record.other_processes_bytes, record.notes) == (3 * GIB, [])
    assert record.holders == holders[1:]

    # Built when the context is there already, it cannot tell the context from what others hold, and says so.
    late = CudaDevice(index=0, memory_budget="6GiB").describe()
    assert late.other_processes_bytes == 3 * GIB + 512 * MIB
    assert late.notes == ["memory of other processes includes the CUDA context of this process"]


def test_kernels_that_load_late_are_no_memory_of_others(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels load when they are first used (CUDA_MODULE_LOADING=LAZY), here 300 MiB in the first session."""
    fake.figures["reserved_bytes.all.current"] = 0
    ours, others = {"context": 0, "kernels": 0}, 3 * GIB

    def read(uuid: str) -> NvmlGpu:
        ours["context"] = 512 * MIB if fake.initialized else 0
        return gpu_reading(24 * GIB - others - sum(ours.values()) - torch.cuda.memory_reserved(0))

    answer_nvml(monkeypatch, read)
    device = CudaDevice(index=0, memory_budget="6GiB")
    assert device.describe().other_processes_bytes == others
    with device.enforced():
        ours["kernels"] += 300 * MIB
        fake.figures["reserved_bytes.all.current"] = 2 * GIB
    assert device.describe().other_processes_bytes == others
    # Later sessions may meet other processes that grow.
    others += GIB
    with device.enforced():
        others += GIB
    assert device.describe().other_processes_bytes == 5 * GIB

    ours["kernels"] += GIB
    own = MemoryHolder(pid=os.getpid(), name=None, used_bytes=2 * GIB + sum(ours.values()))
    monkeypatch.setattr(nvml, "read_holders", lambda uuid: [own])
    record = CudaDevice(index=0, memory_budget="6GiB").describe()
    assert (record.other_processes_bytes, record.notes) == (5 * GIB, [])


def test_training_has_the_budget_of_the_probe_where_that_much_is_free(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same share of what is free is some MiB less a minute later, and an answer may need every byte."""
    fake.figures["reserved_bytes.all.current"] = 0
    free = [20 * GIB]
    answer_nvml(monkeypatch, lambda uuid: gpu_reading(free[0]))
    probed = CudaDevice(index=0, memory_budget=None).budget_bytes
    for change, expected in (
        (0, probed),
        (-GIB, probed),
        (GIB, probed),
        # Not even the headroom makes up for this much.
        (-3 * GIB, 17 * GIB),
    ):
        free[0] = 20 * GIB + change
        device = CudaDevice(index=0, memory_budget=None)
        assert (device.budget_bytes == probed) == (change == 0)
        training = device.budgeted(probed)
        assert training.budget_bytes == expected
        with training.training():
            assert fake.allowed == expected
        assert device.budget_bytes != training.budget_bytes or change == 0
    literal = CudaDevice(index=0, memory_budget="24GiB")
    assert literal.budgeted(24 * GIB).budget_bytes == 24 * GIB


def test_memory_that_the_process_holds_already_is_part_of_every_replay(fake: FakeCuda) -> None:
    """A model of the user's that lies on the GPU is neither freed nor moved by a step."""
    device = CudaDevice(index=0, memory_budget="6GiB")
    assert device.new_allocator().reserved_bytes == 0
    fake.held = 2 * GIB
    for one in (device, device.expandable()):
        allocator = one.new_allocator()
        assert allocator.allocated_bytes == 2 * GIB <= allocator.reserved_bytes
        with pytest.raises(BudgetExceeded):
            allocator.malloc(4 * GIB + 1)
    with device.enforced():
        # What a session takes is not held by others.
        fake.held = 3 * GIB
        assert device.new_allocator().allocated_bytes == 2 * GIB
    assert device.new_allocator().allocated_bytes == 3 * GIB


def test_options_of_the_allocator_that_are_not_modelled_are_noted_and_nothing_is_recorded(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: fake.calls.append("record"))
    for value, is_recorded in (("max_split_size_mb:64", False), ("expandable_segments:True", True)):
        fake.calls.clear()
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
        device = CudaDevice(index=0, memory_budget="6GiB")
        with device.enforced():
            assert ("record" in fake.calls) is is_recorded
        assert bool([note for note in device.describe().notes if "max_split_size_mb" in note]) != is_recorded


def test_a_missing_gpu_is_refused(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"cuda:3 was asked for, and torch finds 1: cuda:0 to cuda:0"):
        CudaDevice(index=3, memory_budget=None)
    with pytest.raises(InputError):
        CudaDevice(index=-1, memory_budget=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device cpu"):
        CudaDevice(index=0, memory_budget=None)


# A real GPU.


@pytest.fixture
def real() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    device = CudaDevice(index=0, memory_budget="1000MiB")
    device.release()
    return device


@pytest.mark.gpu
def test_real_step_inside_the_cap_fits(real: CudaDevice) -> None:
    with real.enforced() as meter:
        held = torch.empty(512 * MIB, dtype=torch.uint8, device=real.torch_device)
        read = meter.stats()
    assert held.numel() <= read.peak_allocated_bytes <= (read.peak_reserved_bytes or 0) <= real.budget_bytes
    assert read.retries == 0
    assert real.refuses(read) is None


@pytest.mark.gpu
def test_real_second_session_starts_like_the_first(real: CudaDevice) -> None:
    reserved = []
    for _ in range(2):
        with real.enforced() as meter:
            reserved.append(meter.stats().reserved_bytes)
            x = torch.ones(64, 64, device=real.torch_device)
            (x @ x).sum().item()
            del x
    assert reserved[1] == reserved[0]


@pytest.mark.gpu
def test_real_step_over_the_cap_is_out_of_memory_and_the_cap_goes(real: CudaDevice) -> None:
    before = torch.cuda.get_per_process_memory_fraction(0)
    found: BaseException | None = None
    with real.enforced() as meter:
        try:
            torch.empty(2 * GIB, dtype=torch.uint8, device=real.torch_device)
        except torch.OutOfMemoryError as error:
            found = error.with_traceback(None)
        read = meter.stats()
    assert found is not None
    assert classify(found) is Verdict.DEVICE
    assert (read.peak_reserved_bytes or 0) <= real.budget_bytes
    assert torch.cuda.get_per_process_memory_fraction(0) == before
    free, _ = torch.cuda.mem_get_info(0)
    if free < 3 * GIB:
        pytest.skip(f"needs 3 GiB free on the GPU to show that the cap is gone, found {free} bytes")
    assert torch.empty(2 * GIB, dtype=torch.uint8, device=real.torch_device).numel() == 2 * GIB


@pytest.mark.gpu
def test_real_allocator_may_hold_the_whole_budget(real: CudaDevice) -> None:
    # Whole segments, 2 MiB or 20 MiB pages alike: one byte less in the cap would refuse the last of them.
    with real.enforced() as meter:
        already = meter.stats().reserved_bytes or 0
        pieces = (real.budget_bytes - already) // (40 * MIB)
        held = [torch.empty(40 * MIB, dtype=torch.uint8, device=real.torch_device) for _ in range(pieces)]
        read = meter.stats()
    assert len(held) == pieces
    assert (read.peak_reserved_bytes or 0) <= real.budget_bytes
    assert read.retries == 0


@pytest.mark.gpu
def test_real_segments_are_expandable_inside_and_fixed_outside(real: CudaDevice) -> None:
    reason = real.why_not_expandable()
    if reason is not None:
        pytest.skip(reason)
    kinds = []
    for device in (real, real.expandable(), real):
        with device.enforced() as meter:
            held = torch.empty(40 * MIB, dtype=torch.uint8, device=device.torch_device)
            segments = {one["address"]: one["is_expandable"] for one in torch.cuda.memory_snapshot()}
            start = max(address for address in segments if address <= held.data_ptr())
            kinds.append(segments[start])
            assert (meter.stats().peak_reserved_bytes or 0) <= real.budget_bytes
            del held
    assert kinds == [False, True, False]


@pytest.mark.gpu
def test_real_gpu_is_described(real: CudaDevice) -> None:
    record = CudaDevice(index=0, memory_budget=None).describe()
    free, _ = torch.cuda.mem_get_info(0)
    assert record.total_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 0 < record.budget_bytes <= free + torch.cuda.memory_reserved(0)
    assert visible_gpus()[0].name == record.name
