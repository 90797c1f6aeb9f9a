"""One probe: its caps, errors above a size that fits, spills, and memory that varies."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import autobatch
from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt
from autobatch.device.oom import loses_context
from autobatch.search.one_probe import (
    LOST,
    FailedSizes,
    Probing,
    SpillGuard,
    caps_of,
    has_ample_room,
    variation_of,
)
from autobatch.search.search import search
from autobatch.setup.attempt import Outcome, attempt
from autobatch.setup.child import ChildCrashed
from autobatch.setup.session import ThisProcess
from autobatch.setup.setup import describe_setup
from tests.support.probes import WIDTH, classify, probed, work
from tests.support.sizes import machine_of, outcome_of, replay_of
from tests.support.step_workloads import WORKLOADS, setup


def test_the_smallest_cap_that_an_answer_reaches_limits_it() -> None:
    made = setup(WORKLOADS["perceptron"]())
    samples = describe_setup(made).samples
    limits = Options().with_values(target_batch=9, max_micro_batch=samples + 1)
    caps = caps_of(describe_setup(made), limits)
    assert caps == {"target_batch": 9, "max_micro_batch": samples + 1, "dataset": samples}
    probing = Probing(ThisProcess(made), limits, caps, SpillGuard(active=False), Progress())
    assert probing.cap == 9
    assert [probing.limited_by(size) for size in (9, 8)] == ["target_batch", "memory"]


@pytest.mark.parametrize(
    ("micro_batch", "peak", "ample"),
    [(2, 100, True), (2, 500, True), (2, 540, False), (300, 790, True), (300, 990, False), (1, 450, False)],
)
def test_ample_room_is_far_more_than_one_sample_more(micro_batch: int, peak: int, ample: bool) -> None:
    ran = outcome_of(micro_batch, True, peak).attempt
    assert has_ample_room(ran, 1000) is ample
    assert not has_ample_room(outcome_of(micro_batch, True, None).attempt, 1000)


def judged(guard: SpillGuard, size: int, seconds: float) -> Attempt:
    ran = Attempt(
        micro_batch=size,
        fits=True,
        peak_allocated_bytes=1,
        peak_reserved_bytes=1,
        seconds=1.0,
        step_seconds=seconds,
    )
    return guard.judge(Outcome(ran, None)).attempt


RAN = [(100, 1.0), (10, 0.9), (200, 2.0), (201, 7.0), (150, 5.0)]


def test_a_smaller_size_that_is_slower_per_sample_is_not_rejected() -> None:
    """Costs per step weigh more in a smaller size, but cannot slow a larger one."""
    guard = SpillGuard(active=True)
    assert [judged(guard, *one).fits for one in RAN] == [True, True, True, False, True]


def test_the_reason_names_the_factor_and_a_device_that_cannot_spill_rejects_nothing() -> None:
    guard = SpillGuard(active=True)
    judged(guard, 100, 1.0)
    assert "4.0 times" in str(judged(guard, 200, 8.0).reason)
    idle = SpillGuard(active=False)
    assert all(judged(idle, *one).fits for one in RAN)


LAUNCH = RuntimeError("CUDA error: invalid configuration argument")
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors …")


class Process:
    """Counts its restarts."""

    def __init__(self, *, is_replaceable: bool = True) -> None:
        self.is_replaceable = is_replaceable
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1


def sizes_failing_from(first: int, error: Exception, process: Process) -> FailedSizes:
    machine = machine_of(lambda m: 9 * m + 100, lambda m: m)

    def run(size: int) -> Outcome:
        if size >= first:
            raise error
        return machine.run(size)

    return FailedSizes(run, process)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "restarts"),
    [(LAUNCH, False), (ILLEGAL, True), (ChildCrashed("the child ended (SIGSEGV)"), True)],
    ids=["launch", "illegal access", "crash"],
)
def test_an_error_above_a_size_that_fits_bounds_the_search(error: Exception, restarts: bool) -> None:
    process = Process()
    sizes = sizes_failing_from(500, error, process)
    found = search(sizes, cap=10_000, replay=replay_of(), stopped=lambda: sizes.stopped_by)
    assert (found.micro_batch, found.upper_bound_by, found.stopped_by) == (499, "error", None)
    failed = [one for one in found.attempts if one.is_error]
    assert failed[-1].micro_batch == min(one.micro_batch for one in failed) == 500
    assert {one.reason for one in failed} == {str(error).splitlines()[0]}
    assert process.restarts == (len(failed) if restarts else 0)


def test_memory_still_bounds_a_search_below_the_errors() -> None:
    sizes = sizes_failing_from(2000, LAUNCH, Process())
    found = search(sizes, cap=10_000, replay=replay_of())
    assert (found.micro_batch, found.upper_bound_by) == (990, "replay")
    assert not any(one.is_error for one in found.attempts)


def test_an_error_before_any_size_fits_is_raised() -> None:
    with pytest.raises(RuntimeError, match="invalid configuration"):
        search(sizes_failing_from(1, LAUNCH, Process()), cap=100, replay=replay_of())


def test_a_process_without_a_child_stops_with_the_best_size_once_its_context_is_lost() -> None:
    process = Process(is_replaceable=False)
    sizes = sizes_failing_from(500, ILLEGAL, process)
    found = search(sizes, cap=10_000, replay=replay_of(), stopped=lambda: sizes.stopped_by)
    assert (found.upper_bound_by, found.stopped_by, process.restarts) == (None, LOST, 0)
    assert found.micro_batch == max(one.micro_batch for one in found.attempts if one.fits)


def test_a_refusal_that_the_budget_did_not_cause_is_repeated_once() -> None:
    """The first failure is transient: the size fits. The second one stays, and is marked."""
    machine = machine_of(lambda m: 9 * m + 100, lambda m: m)
    refusals = {300: 1, 700: 9}

    def run(size: int) -> Outcome:
        outcome = machine.run(size)
        if refusals.get(size, 0):
            refusals[size] -= 1
            attempt = msgspec.structs.replace(outcome.attempt, fits=False, is_below_budget=True)
            return Outcome(attempt, None)
        return outcome

    sizes = FailedSizes(run, Process())  # type: ignore[arg-type]
    assert sizes(300).attempt.fits
    assert machine.asked == [300, 300]
    found = sizes(700).attempt
    assert (found.fits, found.is_below_budget) == (False, True)
    assert machine.asked == [300, 300, 700, 700]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("the workload raised AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", False),
    ],
)
def test_a_lost_context_is_told_by_its_text(text: str, lost: bool) -> None:
    assert loses_context(InputError(text)) is lost


def limited(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if len(batch[1]) > 77:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return classify(model, batch)


def test_a_probe_names_the_error_and_keeps_its_answer() -> None:
    result, listener = probed(work(loss=limited), memory_budget="10MiB")
    probe = result.probe
    assert (probe.micro_batch, probe.upper_bound_by, probe.oom_count) == (77, "error", 0)
    assert any("invalid configuration argument" in one and "78" in one for one in listener.notes)
    again, _ = probed(work(loss=limited), memory_budget="10MiB")
    assert again.probe.micro_batch == 77
    assert (
        autobatch.plan(work(loss=limited), target_batch=300, device="cpu", memory_budget="10MiB").micro_batch
        <= 77
    )
    assert torch.is_grad_enabled()


class Nodes(Dataset):
    """Seed nodes of a graph, whose neighbours are drawn when they are collated."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        return index


def neighbourhood(seeds: list[int]) -> Tensor:
    return torch.ones(len(seeds) * 4 + random.randrange(4 * len(seeds)), WIDTH)


def draws() -> dict[str, object]:
    return {
        "train_data": Nodes(),
        "collate": neighbourhood,
        "loss": lambda model, x: model(x).square().mean(),
    }


def test_memory_that_varies_from_draw_to_draw_is_said_with_its_share() -> None:
    result, listener = probed(work(lambda: nn.Linear(WIDTH, 64), **draws()), memory_budget="300KiB")
    assert 0.01 < result.probe.memory_variation < 2
    said = [note for note in listener.notes if "memory varies" in note]
    assert len(said) == 1
    assert f"{result.probe.memory_variation:.1%}" in said[0]


@pytest.mark.parametrize("name", ["perceptron", "transformer"])
def test_equal_micro_batches_of_other_workloads_do_not_vary(name: str) -> None:
    trace = attempt(setup(WORKLOADS[name]()), 3).trace
    assert trace is not None
    assert variation_of(trace) is None


def test_events_without_phases_say_nothing() -> None:
    trace = attempt(setup(WORKLOADS["perceptron"]()), 3).trace
    assert trace is not None
    assert variation_of(type(trace)(trace.events)) is None
