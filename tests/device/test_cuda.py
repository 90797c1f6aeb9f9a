"""The CUDA device: its arithmetic, its sessions against a stand-in for ``torch.cuda``, and a real card."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.records import MemoryHolder
from autobatch.device import cuda, nvml
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.base import Device
from autobatch.device.cuda import CudaDevice, memory_fraction, others_bytes, why_refused
from autobatch.device.host import HostMemory
from autobatch.device.nvml import NvmlAbsent, NvmlGpu
from autobatch.device.oom import Verdict, classify

GIB, MIB = 1 << 30, 1 << 20


def stats(*, retries: int | None = 0, reserved: int | None = 0) -> MemoryStats:
    return MemoryStats(
        allocated_bytes=0,
        reserved_bytes=reserved,
        peak_allocated_bytes=0,
        peak_reserved_bytes=reserved,
        retries=retries,
    )


def gpu(
    free: int | None = 20 * GIB, *, total: int = 24 * GIB, reserved: int | None = None, mig: bool = False
) -> NvmlGpu:
    return NvmlGpu(
        uuid="GPU-a1",
        name="Alpha",
        total_bytes=None if free is None else total,
        free_bytes=free,
        used_bytes=None,
        driver_reserved_bytes=reserved,
        pci_bus_id=None,
        mig_mode=mig,
        mig_uuids=[],
        driver_version=None,
    )


# Arithmetic.


@pytest.mark.parametrize("total", [8 * GIB, 15_843_721_216, 25_282_281_472, 85_174_976_512, 150_109_880_320])
def test_fraction_allows_the_budget_and_not_a_segment_more(total: int) -> None:
    for budget in (1, 2 * MIB, 3 * 20 * MIB, total // 3, total // 2, total - 2 * MIB, total - 1):
        fraction = memory_fraction(budget, total)
        assert 0 < fraction < 1
        # What the allocator computes from it: static_cast<size_t>(fraction * double(total)).
        assert budget <= int(fraction * float(total)) <= budget + 1
    assert memory_fraction(total, total) == 1.0
    assert memory_fraction(total + 1, total) == 1.0


def test_refusals() -> None:
    assert why_refused(stats(reserved=GIB), GIB) is None
    assert why_refused(stats(reserved=None, retries=None), GIB) is None
    assert "gave its cache back 2 times" in (why_refused(stats(retries=2), GIB) or "")
    over = why_refused(stats(reserved=2 * GIB), GIB)
    assert over == "the allocator held 2.00 GiB, over the budget of 1.00 GiB"


def test_what_others_hold() -> None:
    assert others_bytes(gpu(20 * GIB), held_bytes=GIB) == 3 * GIB
    assert others_bytes(gpu(20 * GIB, reserved=512 * MIB), held_bytes=GIB) == 3 * GIB - 512 * MIB
    assert others_bytes(gpu(20 * GIB), held_bytes=5 * GIB) == 0
    assert others_bytes(gpu(None), held_bytes=0) is None


# Sessions, against a stand-in for torch.cuda that has no notion of tensors.


class FakeCuda:
    """One card of 24 GiB; what the allocator did is set by the test."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.initialized = False
        self.total = 24 * GIB
        self.allowed = self.total
        self.integrated = 0
        self.capability = (8, 9)
        self.figures = {
            "allocated_bytes.all.current": 1,
            "allocated_bytes.all.peak": 3,
            "reserved_bytes.all.current": 2 * GIB,
            "reserved_bytes.all.peak": 4 * GIB,
            "num_alloc_retries": 7,
        }

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, index: int) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(
            name="Alpha",
            total_memory=self.total,
            is_integrated=self.integrated,
            uuid="a1",
            major=major,
            minor=minor,
        )

    def synchronize(self, index: int) -> None:
        self.initialized = True

    def memory_reserved(self, index: int) -> int:
        return self.figures["reserved_bytes.all.current"]

    def memory_stats(self, index: int) -> dict[str, int]:
        return self.figures

    def reset_peak_memory_stats(self, index: int) -> None:
        self.calls.append("reset")

    def empty_cache(self) -> None:
        self.calls.append("empty")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 10 * GIB, 24 * GIB

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        assert isinstance(fraction, float)
        self.allowed = int(fraction * float(self.total))
        self.calls.append(f"allow {self.allowed}")

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.allowed / self.total


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in vars(FakeCuda):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(nvml, "read_holders", lambda uuid: [])
    tell(
        monkeypatch,
        lambda uuid: gpu() if uuid == "GPU-a1" else NvmlAbsent(reason="no card of that name here"),
    )
    return fake


def tell(monkeypatch: pytest.MonkeyPatch, read: Callable[[str], NvmlGpu | NvmlAbsent]) -> None:
    monkeypatch.setattr(nvml, "read_gpu", read)


def test_budget_comes_from_the_gpu_of_that_uuid(fake: FakeCuda) -> None:
    device = CudaDevice(index=0, memory_budget=None)
    assert device.budget_bytes == 22 * GIB - int(1.2 * GIB)
    record = device.describe()
    assert (record.kind, record.name, record.total_bytes) == ("cuda", "Alpha", 24 * GIB)
    assert record.budget_source.startswith("20.0 GiB free (NVML) + 2.00 GiB held by this process")
    assert (device.torch_device, device.kind) == (torch.device("cuda:0"), "cuda")


@pytest.mark.parametrize(
    ("capability", "default", "native"),
    [
        ((6, 1), "fp32", ("fp32",)),
        ((7, 0), "fp32", ("fp32", "fp16")),
        ((7, 5), "fp32", ("fp32", "fp16")),
        ((8, 0), "bf16", ("bf16", "fp32")),
        ((12, 0), "bf16", ("bf16", "fp32")),
    ],
)
def test_16_bits_only_on_gpus_that_are_built_for_them(
    fake: FakeCuda, capability: tuple[int, int], default: str, native: tuple[str, ...]
) -> None:
    fake.capability = capability
    device = CudaDevice(index=0, memory_budget="6GiB")
    assert device.compute_capability == capability
    assert (device.default_precision(), device.native_precisions()) == (default, native)


def test_answers_that_hold_for_every_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Device = CudaDevice(index=0, memory_budget="6GiB")
    assert not device.is_traceable
    assert device.may_spill
    assert device.reads_pinned_memory
    assert device.gains_from_compile
    assert device.optimizer_implementations() == ("default", "fused")
    for installed in (object(), None):
        monkeypatch.setattr("importlib.util.find_spec", {"triton": installed}.__getitem__)
        assert (device.compiler_missing() is None) == (installed is not None)
    assert device.allocator_config == device.new_allocator().config


def test_a_full_gpu_leaves_no_budget(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.figures["reserved_bytes.all.current"] = 0
    tell(monkeypatch, lambda uuid: gpu(GIB) if uuid == "GPU-a1" else NvmlAbsent(reason="no slice"))
    with pytest.raises(DoesNotFitError, match=r"1\.00 GiB free \(NVML\) .*--memory-budget"):
        CudaDevice(index=0, memory_budget=None)
    assert CudaDevice(index=0, memory_budget="6GiB").budget_bytes == 6 * GIB


def test_session_caps_and_puts_the_former_cap_back(fake: FakeCuda) -> None:
    former = 17 * GIB + 12_345
    fake.allowed = former
    device = CudaDevice(index=0, memory_budget="6GiB")
    with device.enforced() as meter:
        assert fake.calls == ["empty", f"allow {6 * GIB}", "reset"]
        meter.mark("forward")
        assert meter.phase == "forward"
    assert fake.allowed == former
    assert fake.calls.count("empty") == 1


def test_former_cap_comes_back_to_the_byte(fake: FakeCuda) -> None:
    fake.total = 25_282_281_472
    device = CudaDevice(index=0, memory_budget="50%")
    # Of these, a share that is read and set again as it stands would lose a byte.
    for former in (1_580_363_928, 1_580_376_275, 1_580_388_622):
        fake.allowed = former
        with device.training():
            assert fake.allowed == fake.total // 2
        assert fake.allowed == former


def test_former_cap_comes_back_after_an_error(fake: FakeCuda) -> None:
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
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: told[-1] if told else "")
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
        assert not told
    for session in (device.training, device.enforced):
        told.clear()
        with session():
            assert told == ["expandable_segments:True"]
            assert fake.allowed == 6 * GIB
        assert told == ["expandable_segments:True", "expandable_segments:False"]
        assert fake.allowed == 24 * GIB
    assert plain.why_not_expandable() is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"was_told": "expandable_segments:False"}, None),
        ({"was_told": "max_split_size_mb:20"}, "something else has told"),
        ({"environ": {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}}, "PYTORCH_ALLOC_CONF is set"),
        ({"environ": {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}}, "PYTORCH_CUDA_ALLOC_CONF is set"),
        ({"platform": "win32"}, "for CUDA on Linux"),
        ({"platform": "HIP"}, "for CUDA on Linux"),
        ({"backend": "cudaMallocAsync"}, "only torch's own allocator"),
        ({"can_be_told": False}, "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
    ],
)
def test_where_the_allocator_cannot_be_told(changes: dict[str, object], said: str | None) -> None:
    given = {"environ": {}, "platform": "linux", "backend": "native", "can_be_told": True, "was_told": ""}
    given |= changes
    found = cuda.why_not_expandable(given.pop("environ"), **given)  # type: ignore[arg-type]
    assert found is None if said is None else said in str(found)


def test_cap_is_lifted_where_torch_cannot_say_what_stood(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    with CudaDevice(index=0, memory_budget="6GiB").training():
        assert fake.allowed == 6 * GIB
    assert fake.allowed == 24 * GIB


def test_meter_counts_retries_of_its_own_session(fake: FakeCuda) -> None:
    device = CudaDevice(index=0, memory_budget="6GiB")
    with device.training() as meter:
        meter.count([torch.zeros(1)])
        assert meter.trace() is None
        read = meter.stats()
        assert read == MemoryStats(1, 2 * GIB, 3, 4 * GIB, 0)
        assert device.refuses(read) is None
        fake.figures["num_alloc_retries"] = 9
        assert device.refuses(meter.stats()) == "the allocator gave its cache back 2 times to find room"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (NvmlAbsent(reason="the NVIDIA driver is not loaded"), "the NVIDIA driver is not loaded"),
        (gpu(None), "does not tell what is free"),
        (gpu(mig=True), "cut by MIG"),
    ],
)
def test_driver_serves_where_nvml_does_not(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, answer: NvmlGpu | NvmlAbsent, words: str
) -> None:
    tell(monkeypatch, lambda uuid: answer if uuid == "GPU-a1" else NvmlAbsent(reason="no such slice"))
    device = CudaDevice(index=0, memory_budget=None)
    assert device.budget_bytes == 12 * GIB - int(1.2 * GIB)
    record = device.describe()
    assert record.other_processes_bytes is None
    assert len(record.notes) == 1
    assert words in record.notes[0]
    assert "(the CUDA driver)" in record.budget_source


def test_slice_is_found_before_its_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"MIG-a1": gpu(9 * GIB, total=10 * GIB), "GPU-a1": gpu(70 * GIB, mig=True)}
    tell(monkeypatch, known.__getitem__)
    assert "9.00 GiB free (NVML)" in CudaDevice(index=0, memory_budget=None).describe().budget_source


def test_unified_memory_is_counted_by_the_host(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostMemory(total_bytes=32 * GIB, available_bytes=12 * GIB, source="what /proc/meminfo says")
    monkeypatch.setattr(cuda, "host_memory", lambda: host)
    fake.integrated = 1
    device = CudaDevice(index=0, memory_budget=None)
    assert device.budget_bytes == 14 * GIB - int(1.2 * GIB)
    record = device.describe()
    assert (record.notes, record.other_processes_bytes) == (["the card shares the host's memory"], None)
    assert "12.0 GiB free (what /proc/meminfo says)" in record.budget_source
    monkeypatch.setattr(cuda, "host_memory", lambda: host._replace(available_bytes=None))
    assert "free (NVML)" in CudaDevice(index=0, memory_budget=None).describe().budget_source


def test_others_are_counted_without_this_process(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.figures["reserved_bytes.all.current"] = 0

    def read(uuid: str) -> NvmlGpu:
        context = 512 * MIB if fake.initialized else 0
        return gpu(24 * GIB - 3 * GIB - context - fake.figures["reserved_bytes.all.current"])

    tell(monkeypatch, read)
    holders = [MemoryHolder(pid=pid, name=None, used_bytes=3 * GIB) for pid in (os.getpid(), 1)]
    monkeypatch.setattr(nvml, "read_holders", lambda uuid: holders)
    device = CudaDevice(index=0, memory_budget="6GiB")
    fake.figures["reserved_bytes.all.current"] = 2 * GIB
    record = device.describe()
    assert (record.other_processes_bytes, record.notes) == (3 * GIB, [])
    assert record.holders == holders[1:]

    # Built when the context is there already, it cannot tell the context from what others hold, and says so.
    late = CudaDevice(index=0, memory_budget="6GiB").describe()
    assert late.other_processes_bytes == 3 * GIB + 512 * MIB
    assert late.notes == ["what other processes hold includes this process's own CUDA context"]


def test_visible_gpus(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = cuda.visible_gpus()
    assert (found.index, found.uuid, found.capability, found.free_bytes) == (0, "a1", "8.9", 20 * GIB)
    tell(monkeypatch, lambda uuid: NvmlAbsent(reason="none"))
    assert cuda.visible_gpus()[0].free_bytes is None


def test_gpu_that_is_not_there(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"cuda:3 was asked for, and torch finds 1: cuda:0 to cuda:0"):
        CudaDevice(index=3, memory_budget=None)
    with pytest.raises(InputError):
        CudaDevice(index=-1, memory_budget=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device cpu"):
        CudaDevice(index=0, memory_budget=None)
    assert cuda.visible_gpus() == []


# A real card.


@pytest.fixture
def real() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
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
        pytest.skip(f"needs 3 GiB free on the card to show that the cap is gone, found {free} bytes")
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
    assert cuda.visible_gpus()[0].name == record.name
