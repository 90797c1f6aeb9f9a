"""Limits at which the batches of a plan fit, against training at them and attempts at every size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from autobatch import DoesNotFitError, Progress
from autobatch.api.pipeline import run_command
from autobatch.api.run import Run
from autobatch.core.options import Options, options_from
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.rehearsal import attempt
from autobatch.rehearsal.setup import Setup, open_setup
from autobatch.search import find_limit as limits
from autobatch.search.find_limit import find_limit, limit_of_plan
from autobatch.search.probe import Limit
from benchmarks.workloads import WORKLOADS
from tests.support.probes import Listener, probe_of
from tests.support.ragged import Sequences, count_ooms, ragged_workload, simulated_setup, wide_model
from tests.support.training import fingerprint

WORKLOAD = ragged_workload(model=wide_model, train_data=Sequences(samples=512, longest=59))
TARGET = 128


def planned(setup: Setup, known: Limit, samples: int) -> tuple[Limit, Listener]:
    listener = Listener()
    return limit_of_plan(ThisProcess(setup), known, samples, 0, listener), listener


def found_in(setup: Setup, samples: int | None, home: Path) -> tuple[Limit, Listener]:
    listener = Listener()
    return find_limit(ThisProcess(setup), Options(), share=samples, home=home, progress=listener), listener


def test_a_limit_is_lowered_to_one_at_which_training_does_not_run_out(tmp_path: Path) -> None:
    setup = simulated_setup(WORKLOAD, "40MiB")
    before = fingerprint(setup.model)
    limit, heard = found_in(setup, TARGET, tmp_path)
    assert fingerprint(setup.model) == before
    found, alone = limit.probe, limit.probe.micro_batch_alone
    assert found.upper_bound_by == "run"
    assert heard.sizes[-1] == found.micro_batch == limit.planned < alone
    assert f"{alone} fits alone" in heard.notes[-1]
    assert count_ooms(WORKLOAD, setup, found.micro_batch, target=TARGET, steps=6) == 0
    # One step fewer is what its batches do not survive.
    larger = math.ceil(TARGET / (math.ceil(TARGET / found.micro_batch) - 1))
    assert found.micro_batch < larger <= alone
    assert count_ooms(WORKLOAD, setup, larger, target=TARGET, steps=12) > 0


def test_a_smaller_size_that_fails_alone_is_not_the_answer(monkeypatch) -> None:
    """Real batches survive at 64 and at 43; of the longest samples, only 32 fit."""
    reasons = iter(["too large", None, None, None])
    monkeypatch.setattr(limits, "run_batches", lambda *_: next(reasons))
    real = limits.run_attempt
    sizes = []

    def run(process: ThisProcess, size: int, progress: Progress) -> Any:
        sizes.append(size)
        return real(process, 400 if size > 32 else 8, progress)

    monkeypatch.setattr(limits, "run_attempt", run)
    known = Limit(probe_of(TARGET), planned=TARGET)
    found, heard = planned(simulated_setup(WORKLOAD, "40MiB"), known, TARGET)
    assert (sizes, found.planned, found.probe.oom_count) == ([64, 43, 32], 32, 2)
    assert "takes 32 at most" in heard.notes[0]


@pytest.mark.program
def test_a_sample_that_does_not_fit_alone_is_named_before_training() -> None:
    class WithOutlier(Sequences):
        def __getitem__(self, index: int):
            if index == 17:
                return torch.ones(40_000, dtype=torch.long), torch.ones(40_000, dtype=torch.long)
            return super().__getitem__(index)

    workload = ragged_workload(model=wide_model, train_data=WithOutlier(samples=64, longest=9))
    asked = {"target_batch": 16, "device": "cpu", "memory_budget": "32MiB"}
    with pytest.raises(DoesNotFitError, match=r"sample 17 of the training data.* 40000.*cut shorter or left"):
        run_command(Run(workload=workload, options=options_from("plan", asked)))


# Samples of one size: micro-batches of the even split that do not fit although a larger one does.

BATCH = 2048


@pytest.fixture(scope="module", name="near")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Limit]:
    options = Options(device="sim:t4", memory_budget="6MiB")
    setup = open_setup(WORKLOADS["mlp-heavy"](), options)
    return setup, found_in(setup, None, tmp_path_factory.mktemp("home"))[0]


def test_a_batch_is_split_into_more_if_its_micro_batches_do_not_fit(near: tuple[Setup, Limit]) -> None:
    setup, limit = near
    fits = {size: attempt(setup, size).attempt.fits for size in (697, 683, 682, 512)}
    assert fits == {697: True, 683: False, 682: True, 512: True}
    found, heard = planned(setup, limit, BATCH)
    assert (found.planned, heard.sizes) == (512, [683])
    assert "697 fits alone" in heard.notes[0]
    assert found.probe.micro_batch == limit.probe.micro_batch == 697
    assert found.probe.oom_count == limit.probe.oom_count + 1


@pytest.mark.parametrize(("is_known", "samples"), [(True, 697), (True, 1394), (True, 1200), (False, BATCH)])
def test_sizes_that_the_replay_does_not_doubt_are_not_run(
    near: tuple[Setup, Limit], is_known: bool, samples: int
) -> None:
    setup, limit = near
    known = limit if is_known else limit._replace(programs=())
    found, heard = planned(setup, known, samples)
    assert (found, heard.sizes) == (known, [])
