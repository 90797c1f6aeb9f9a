"""Trials with loader workers and with expandable segments: they run with them, and so does what follows."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import autobatch
from autobatch import api as stages
from autobatch.core.knobs import LOADER_WORKERS, applicable
from autobatch.core.options import FitOptions, TuneOptions, options_from
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.cpu import CpuDevice
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.planning import micro_batches
from autobatch.probing.attempt import TrainSetup, attempt
from autobatch.tuning import trial as lab_module
from autobatch.tuning.configuration import Measurement
from autobatch.tuning.context import usable_cores
from autobatch.tuning.find_fastest import TuningResult
from autobatch.tuning.lr_trial import LrTrialSpec, short_run
from autobatch.tuning.timing import Timing, fetch_share
from autobatch.tuning.trial import TrialRunner, TrialSpec, open_trials
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import capture_random_state
from tests.support.commandline import SMALL
from tests.support.kinds import Augmented
from tests.support.training import make_workload, mean_loss, points

TRACED = 1
"""What a prediction, which runs on tensors without memory, takes every number for."""
DEFAULTS: dict[str, Any] = {"micro_batch_shift": 0, "loader_workers": 0, "expandable_segments": False}


class Signed(Augmented):
    """Every sample says which process made it."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return inputs, labels, os.getpid()


def signed(seen: set[int], **fields: Any):
    """A workload that writes down where its training samples came from."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels, made_by = batch
        if torch.is_grad_enabled():
            seen.update(made_by.tolist())
        return mean_loss(model, (inputs, labels))

    data = Signed(*points(64, dtype=torch.float32).columns)
    model = lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))  # noqa: E731
    return make_workload(**{"model": model, "train_data": data, "loss": loss, **fields})


def opened(workload, device=None, *, options: Any = None, **more: Any) -> TrialRunner:
    torch.manual_seed(0)
    made = TrainSetup(
        workload=workload,
        model=workload.model(),
        device=device or CpuDevice(memory_budget="1GiB"),
        worst_case=WorstCaseSampler(workload),
        precision="fp32",
    )
    task = TrialSpec(limit=8, cap=64, samples=64, planned_steps=100, seconds=0.0)
    runner = TrialRunner(
        made, options or options_from(TuneOptions, {"target_batch": 64}), task._replace(**more)
    )
    runner.begin(DEFAULTS)
    return runner


def test_a_trial_with_workers_measures_windows_that_workers_fed() -> None:
    seen: set[int] = set()
    runner = opened(signed(seen))
    assert runner.measure(DEFAULTS).feasible
    assert seen == {os.getpid()}
    seen.clear()
    before = capture_random_state()
    assert runner.measure({**DEFAULTS, "loader_workers": 2}).feasible
    assert len(seen - {os.getpid()}) == 2
    assert not multiprocessing.active_children()
    assert torch.equal(capture_random_state().torch, before.torch)


def test_a_number_of_workers_that_was_asked_for_feeds_every_trial_and_is_not_tuned() -> None:
    seen: set[int] = set()
    options = options_from(FitOptions, {"target_batch": 64, "workers": 1})
    runner = opened(signed(seen), options=options)
    assert runner.measure({"micro_batch_shift": 1}).feasible
    assert len(seen - {os.getpid()}) == 1
    assert runner.context().loader == "a number of workers was asked for"
    _, notes = applicable(runner.context(), [LOADER_WORKERS])
    assert notes == ["loader_workers is not tuned: a number of workers was asked for"]


@pytest.mark.parametrize(
    ("options", "values", "ahead"),
    [({}, {}, 2), ({}, {"prefetch": 8}, 8), ({"prefetch": 3}, {"prefetch": 8}, 3)],
)
def test_a_trial_is_fed_as_far_ahead_as_the_knob_says(options, values, ahead, monkeypatch) -> None:
    """… unless it was asked for: then so by what was asked."""
    seen: list[int] = []

    def noted(*_: object, prefetch: int, **more: object) -> Timing:
        seen.append(prefetch)
        return Timing(1.0, 1.0, 0.0)

    monkeypatch.setattr(lab_module, "time_steps", noted)
    fit = options_from(FitOptions, {"target_batch": 16, **options})
    opened(signed(set()), options=fit).measure({**DEFAULTS, "loader_workers": 2, **values})
    assert seen == [ahead]


def test_a_trial_whose_workers_raise_is_infeasible_and_the_next_one_runs() -> None:
    home = os.getpid()

    class Shy(Signed):
        def __getitem__(self, index: int):
            if os.getpid() != home:
                raise ValueError("not here")
            return super().__getitem__(index)

    runner = opened(signed(set(), train_data=Shy(*points(64, dtype=torch.float32).columns)))
    refused = runner.measure({**DEFAULTS, "loader_workers": 2})
    assert "the workload's data raised ValueError: not here" in (refused.failure or "")
    assert not multiprocessing.active_children()
    assert runner.measure(DEFAULTS).feasible


@pytest.mark.parametrize(("a_fetch", "share"), [(1.0, 0.25), (9.0, 0.75), (0.0001, 0.0)])
def test_the_share_of_fetching_is_measured(a_fetch: float, share: float) -> None:
    now = [0.0]

    class Timed(Augmented):
        def __getitem__(self, index: int):
            now[0] += a_fetch
            return super().__getitem__(index)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        now[0] += 3.0 * len(batch[0])
        return mean_loss(model, batch)

    workload = signed(set(), loss=loss, train_data=Timed(*points(64, dtype=torch.float32).columns))
    runner = opened(workload)
    clocked = replace(runner.setup, clock=lambda: now[0])
    assert fetch_share(clocked, 8) == pytest.approx(share)
    here = replace(runner, setup=clocked).context()
    assert (here.cores, here.loader) == (usable_cores(), None)
    assert here.fetch_share == pytest.approx(share if usable_cores() > 1 else 0.0)


def test_where_memory_runs_out_the_share_is_not_known() -> None:
    ticks = iter(range(10**6))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    runner = opened(signed(set(), loss=loss))
    assert fetch_share(replace(runner.setup, clock=lambda: float(next(ticks))), 8) == 0.0


def gpu(folder: Path, budget: str, **more: Any) -> SimulatedDevice:
    return SimulatedDevice(load_profile("rtx-4090", user_dir=folder), memory_budget=budget, **more)


def deep() -> nn.Module:
    layers = [nn.Linear(640, 640) for _ in range(6)]
    return nn.Sequential(nn.Linear(5, 640), *layers, nn.Linear(640, 3))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CachingAllocator]:
    """Every allocator that a simulated card makes."""
    allocators: list[CachingAllocator] = []
    new = SimulatedDevice.new_allocator

    def told(self: SimulatedDevice) -> CachingAllocator:
        allocators.append(new(self))
        return allocators[-1]

    monkeypatch.setattr(SimulatedDevice, "new_allocator", told)
    return allocators


def test_expandable_segments_have_a_limit_of_their_own_that_really_runs(
    tmp_path: Path, made: list[CachingAllocator]
) -> None:
    """Against attempts on a card that is expandable from the start."""
    workload = signed(set(), model=deep)
    device = gpu(tmp_path, "60MiB")
    runner = opened(workload, device, cap=4096, samples=4096, limit=16)
    values = {**DEFAULTS, "expandable_segments": True}
    limit = runner._limit(values)
    assert isinstance(limit, int)
    oracle = replace(runner.setup, device=gpu(tmp_path, "60MiB", expandable_segments=True))
    assert attempt(oracle, limit).attempt.fits
    assert not attempt(oracle, limit + 1).attempt.fits
    assert limit != autobatch.probe(workload, device="sim:rtx-4090", memory_budget="60MiB").micro_batch
    assert runner.confirm_fits(values) is None
    assert device.new_allocator().config.expandable_segments is False
    made.clear()
    assert runner.measure(values).micro_batch == micro_batches(4096, limit)[0]
    assert {one.config.expandable_segments for one in made} == {True}


def test_where_segments_can_be_expandable() -> None:
    home = Path()
    assert (
        CpuDevice(memory_budget="1GiB").why_not_expandable() == "only the allocator of a GPU keeps segments"
    )
    assert gpu(home, "1GiB").why_not_expandable() is None
    assert gpu(home, "1GiB").expandable().why_not_expandable() == "segments are expandable already"
    runner = opened(signed(set()), gpu(home, "1GiB"))
    assert [axis.name for axis in applicable(runner.context(), ["expandable_segments"])[0]]


@pytest.mark.parametrize("expandable", [False, True])
def test_short_runs_of_learning_rates_have_the_segments_of_the_plan(
    tmp_path: Path, made: list[CachingAllocator], expandable: bool
) -> None:
    runner = opened(signed(set()), gpu(tmp_path, "1GiB"))
    knobs = {"expandable_segments": True} if expandable else {}
    task = LrTrialSpec(default=0.1, target_batch=8, micro_batch=4, precision="fp32", knobs=knobs, steps=4)
    assert [seen.failure for seen in short_run(runner.setup, task, 0.1, 0)] == [None] * 4
    assert {one.config.expandable_segments for one in made} == {expandable}


TALKING = """
import os
class Signed(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index): return torch.randn(4), torch.randn(1)
def workload():
    return small(train_data=Signed())
"""


def test_a_child_that_runs_trials_may_have_workers(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}\n{TALKING}\n")
    options = options_from(TuneOptions, {"target_batch": 32, "device": "cpu", "memory_budget": "64MiB"})
    task = TrialSpec(limit=8, cap=32, samples=32, planned_steps=10, seconds=0.0)

    def setup() -> TrainSetup:
        raise AssertionError

    with open_trials(f"{path}:workload", options, task, setup=setup, isolated=True) as trials:
        trials.begin(DEFAULTS)
        assert trials.measure({**DEFAULTS, "loader_workers": 2}).failure is None


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Let the tuner choose what it is told to."""

    def choose(best: dict[str, Any]) -> None:
        real = stages.find_fastest

        def chosen(*given: Any, **more: Any) -> TuningResult:
            found = real(*given, **more)
            return TuningResult(msgspec.structs.replace(found.tuning, best=best), Measurement(100.0, 5))

        monkeypatch.setattr(stages, "find_fastest", chosen)

    return choose


def test_what_was_chosen_trains_and_goes_on_when_the_run_is_resumed(
    choosing: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autobatch.tuning.context.usable_cores", lambda: 4)
    best = {"loader_workers": 2, "expandable_segments": True}
    choosing(best)
    seen: set[int] = set()
    segments: list[bool] = []
    training = SimulatedDevice.training
    monkeypatch.setattr(
        SimulatedDevice,
        "training",
        lambda self: segments.append(self.new_allocator().config.expandable_segments) or training(self),
    )
    options: dict[str, Any] = {
        "target_batch": 12,
        "device": "sim:rtx-4090",
        "memory_budget": "1GiB",
        "trials": 1,
        "knobs": ",".join(best),
    }
    first = autobatch.fit(signed(seen), steps=3, out=tmp_path / "run", **options)
    assert first.plan is not None
    assert first.plan.knobs == best
    workers = seen - {os.getpid(), TRACED}
    assert len(workers) == 2
    assert segments[-1] is True
    seen.clear()
    segments.clear()
    autobatch.fit(signed(seen), steps=6, out=tmp_path / "run", resume=True, **options)
    assert len(seen - {os.getpid(), TRACED} - workers) == 2
    assert segments[-1] is True
    # By hand: the same samples, drawn by the same seeds, in this process.
    plain = {**options, "trials": 0, "knobs": None, "max_micro_batch": first.plan.micro_batch}
    autobatch.fit(signed(seen), steps=6, out=tmp_path / "plain", sample_seeds=True, **plain)
    weights = [tmp_path / folder / "model.safetensors" for folder in ("run", "plain")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_figures_of_another_number_of_workers_are_of_another_study(tmp_path: Path) -> None:
    facts: Any = type("SetupInfo", (), {"key": {"model": "a"}, "name": "w"})
    task = TrialSpec(limit=8, cap=64, samples=64, planned_steps=100, seconds=0.0)
    here = stages.RunContext(environ={"AUTOBATCH_HOME": str(tmp_path)})
    names = {
        stages._place(facts, options_from(FitOptions, {"target_batch": 64, **given}), task, [], here).name
        for given in ({}, {"workers": 0}, {"workers": 2})
    }
    assert len(names) == 3
