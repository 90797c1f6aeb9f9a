"""Torch's allocator on a GPU against the model of it, sessions on it, and errors of the driver."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch import DoesNotFitError, InputError
from autobatch.core.units import GiB, MiB, format_bytes
from autobatch.device.allocator import CachingAllocator, MemoryStats
from autobatch.device.base import followed_modules
from autobatch.device.cuda import CudaDevice
from autobatch.device.oom import Verdict, classify
from autobatch.device.trace import Trace, replay
from tests.support.kernels import only_stub

pytestmark = pytest.mark.gpu
PROBE = ("probe", "train.py", "--device", "cuda", "--memory-budget", "200MiB", "--json")


def bytes_on(device: torch.device, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def steps_of(device: torch.device, size: int, rounds: int = 3) -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(rounds):
        model(torch.randn(size, 512, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("other_stream", [False, True])
def test_a_replay_of_the_recorded_events_has_the_peaks_of_torch(other_stream: bool) -> None:
    device = CudaDevice(index=0, memory_budget="1GiB")
    for size in (100, 3000):
        model = device.new_allocator(device.budget_bytes)
        with device.session(is_probe=True) as meter:
            steps_of(device.torch_device, size)
            if other_stream:  # which uses no free block of the first
                with torch.cuda.stream(torch.cuda.Stream()):
                    steps_of(device.torch_device, size)
            stats, trace = meter.stats(), meter.trace()
        assert trace is not None
        found = replay(trace, model)
        assert found.peak_allocated_bytes == stats.peak_allocated_bytes
        assert found.peak_reserved_bytes == stats.peak_reserved_bytes


def test_a_phase_begins_after_the_events_before_its_mark() -> None:
    device = CudaDevice(index=0, memory_budget="1GiB")
    held = []
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(device.torch_device)
    with device.session(is_probe=True) as meter, followed_modules(model, meter):

        def mark(phase: str) -> None:
            meter.mark(phase)
            held.append(torch.cuda.memory_allocated(0))

        for _ in range(2):
            mark("forward")
            total = model(torch.randn(300, 512, device=device.torch_device)).sum()
            mark("backward")
            total.backward()
            mark("cleared")
            del total
            model.zero_grad()
        bytes_on(device.torch_device, 1)  # nothing is kept of what follows the last allocation
        trace = meter.trace()
    assert trace is not None
    assert [phase for _, phase in trace.marks] == ["forward", "backward", "cleared"] * 2
    assert [name for _, name in trace.modules] == ["0", "1", "", "2", ""] * 2
    # Each module takes its output as the first block after it was entered.
    outputs = {name: trace.events[position][1] for position, name in trace.modules if name}
    assert outputs == {"0": 300 * 2048 * 4, "1": 300 * 2048 * 4, "2": 300 * 512 * 4}
    for (position, _), bytes_held in zip(trace.marks, held, strict=True):
        found = replay(Trace(trace.events[:position]), CachingAllocator())
        assert found.allocated_bytes == bytes_held - held[0]


def test_the_private_pool_of_a_captured_graph_is_not_replayed() -> None:
    device = CudaDevice(index=0, memory_budget="1GiB")
    with device.session(is_probe=True) as meter:
        layer = nn.Linear(256, 256, device=device.torch_device)
        inputs = torch.randn(64, 256, device=device.torch_device)
        layer(inputs).sum().backward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = layer(inputs)
        graph.replay()
        assert outputs.shape == (64, 256)
        assert meter.trace() is None
        assert meter.stats().peak_reserved_bytes
        del graph, outputs


def test_recurrent_weights_stay_in_one_piece(recwarn: pytest.WarningsRecorder) -> None:
    from autobatch.step.restore import temporary_weights

    layers = nn.LSTM(32, 64, num_layers=2)
    with temporary_weights(layers, torch.device("cuda")):
        layers(torch.randn(5, 3, 32, device="cuda"))
    assert not [one for one in recwarn if "contiguous chunk" in str(one.message)]
    assert layers.weight_ih_l0.device.type == "cpu"


def test_the_whole_budget_may_be_held_and_no_more_within_a_session() -> None:
    """Whole segments, pages of 2 or 20 MiB alike: one byte less in the cap would refuse the last of them."""
    device = CudaDevice(index=0, memory_budget="1000MiB")
    before = torch.cuda.get_per_process_memory_fraction(0)
    with device.session(is_probe=True) as meter:
        left = device.budget_bytes - (meter.stats().reserved_bytes or 0)
        held = [bytes_on(device.torch_device, 40 * MiB) for _ in range(left // (40 * MiB))]
        read = meter.stats()
        assert 40 * MiB * len(held) <= (read.peak_reserved_bytes or 0) <= device.budget_bytes
        assert (read.retries, device.refuses(read)) == (0, None)
        del held
        with pytest.raises(torch.OutOfMemoryError) as refused:
            bytes_on(device.torch_device, 2 * GiB)
    assert classify(refused.value) is Verdict.MEMORY
    assert torch.cuda.get_per_process_memory_fraction(0) == before
    free, _ = torch.cuda.mem_get_info(0)
    if free < 3 * GiB:
        pytest.skip(f"needs 3 GiB free on the GPU to show that the cap is gone, found {free} bytes")
    assert bytes_on(device.torch_device, 2 * GiB).numel() == 2 * GiB


def test_a_second_session_starts_like_the_first() -> None:
    device = CudaDevice(index=0, memory_budget="1000MiB")
    reserved = []
    for _ in range(2):
        with device.session(is_probe=True) as meter:
            reserved.append(meter.stats().reserved_bytes)
            x = torch.ones(64, 64, device=device.torch_device)
            (x @ x).sum().item()
            del x
    assert reserved[1] == reserved[0]


def test_the_budget_is_what_is_free_less_a_headroom_which_makes_up_for_less(monkeypatch) -> None:
    """The same share of what is free is some MiB less a minute later, and an answer may need every byte."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    held, headroom = torch.cuda.memory_reserved(0), max(512 * MiB, int(0.05 * total))

    def opened(free: int) -> CudaDevice:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
        return CudaDevice(index=0, memory_budget=None)

    free = total // 4 * 3
    found = opened(free)
    assert found.budget_bytes == free + held - headroom
    assert found.describe().budget_source.startswith(f"{format_bytes(free)} free (the CUDA driver) + ")
    for less, expected in ((headroom, found.budget_bytes), (total // 2, total // 4 + held)):
        device = opened(free - less).budgeted(found.budget_bytes)
        assert device.budget_bytes == expected
        with device.session(is_probe=False):
            assert int(torch.cuda.get_per_process_memory_fraction(0) * total) in (expected, expected + 1)
    assert CudaDevice(index=0, memory_budget="100%").budgeted(total).budget_bytes == total


def test_options_of_the_allocator_that_are_not_modelled_are_noted_and_nothing_is_recorded(
    monkeypatch,
) -> None:
    for value, is_recorded in (("max_split_size_mb:64", False), ("expandable_segments:True", True)):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
        device = CudaDevice(index=0, memory_budget="1GiB")
        assert device.new_allocator(None).is_expandable is is_recorded
        with device.session(is_probe=True) as meter:
            assert (meter.trace() is not None) is is_recorded
        assert any("max_split_size_mb" in note for note in device.describe().notes) != is_recorded


def test_a_step_that_needed_retries_or_more_than_the_budget_does_not_fit(monkeypatch) -> None:
    device = CudaDevice(index=0, memory_budget="150MiB")
    with device.session(is_probe=True) as meter:
        for size in (60, 120):  # the second needs the segment of the first
            bytes_on(device.torch_device, size * MiB)
        waits: list[int] = []
        monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
        read = meter.stats()
        assert waits == [0], "a probe waits for the GPU"
    assert read.retries == 1
    assert "freed its cache 1 times" in (device.refuses(read) or "")
    over = device.refuses(MemoryStats(peak_reserved_bytes=160 * MiB))
    assert over == "the allocator held 160 MiB, over the budget of 150 MiB"
    assert device.refuses(MemoryStats()) is None


def test_precisions_are_those_of_the_tensor_cores() -> None:
    device = CudaDevice(index=0, memory_budget="1GiB")
    for capability, expected in (((8, 9), ("bf16", "fp32")), ((7, 5), ("fp32", "fp16")), ((6, 1), ("fp32",))):
        device.compute_capability = capability
        assert device.native_precisions() == expected


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("out of memory", DoesNotFitError, "CUDA error: out of memory"),
        ("CUDA-capable device(s) is/are busy", InputError, "CUDA error: .* busy.*compute mode"),
    ],
)
def test_a_context_that_the_driver_refuses_is_one_line(monkeypatch, said: str, kind, words: str) -> None:
    def refuse(_: int) -> None:
        raise torch.AcceleratorError(f"CUDA error: {said}\nSearch for `cudaError' in https://docs.nvidia.com")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(kind, match=f"cuda:0 cannot be opened: {words}") as caught:
        CudaDevice(index=0, memory_budget="1GiB")
    assert "\n" not in str(caught.value)


@only_stub
@pytest.mark.parametrize("call", ["malloc:3:2", "gemm:5:3"])
def test_a_size_at_which_memory_runs_out_does_not_fit(on_gpu, call: str) -> None:
    """The driver, and cuBLAS with its status for a failed allocation."""
    done = on_gpu(*PROBE, STUB_FAULT=call)
    found = done.json["probe"]
    failed = [one["micro_batch"] for one in found["attempts"] if not one["fits"]]
    assert failed
    assert found["micro_batch"] not in failed


@only_stub
@pytest.mark.parametrize("call", ["launch:20:700:1:1", "sync:3:719:1:1"])
def test_a_lost_context_at_every_size_ends_in_one_line(on_gpu, call: str) -> None:
    """Every later call fails, too, also those that restore the cap and free the cache."""
    done = on_gpu(*PROBE, codes=(1, 2), STUB_FAULT=call)
    assert "illegal memory access" in done.err or "unspecified launch failure" in done.err
    assert "Traceback" not in done.err
