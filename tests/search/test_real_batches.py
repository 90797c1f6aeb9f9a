"""Limits that batches of the run survive, against training at them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from autobatch import DoesNotFitError, Probe, Progress
from autobatch.api.pipeline import run_command
from autobatch.api.run import Run
from autobatch.core.check_options import options_from
from autobatch.core.options import Options
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import Setup
from autobatch.search import real_batches
from autobatch.search.find_limit import find_limit
from autobatch.search.real_batches import survive_real_batches
from tests.support.probes import Listener, probe_of
from tests.support.ragged import Sequences, count_ooms, ragged_workload, simulated_setup, wide_model
from tests.support.training import fingerprint, make_setup, tokens

WORKLOAD = ragged_workload(model=wide_model, train_data=Sequences(samples=512, longest=59))
TARGET = 128


def limit_of(setup: Setup, target: int | None, home: Path) -> tuple[Probe, Listener]:
    """Find the limit of a batch."""
    listener = Listener()
    found = find_limit(ThisProcess(setup), Options(), share=target, home=home, progress=listener)
    return found.probe, listener


def test_a_limit_is_lowered_to_one_at_which_training_does_not_run_out(tmp_path: Path) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, "40MiB")
    before = fingerprint(setup.model)
    found, heard = limit_of(setup, TARGET, tmp_path)
    assert fingerprint(setup.model) == before
    alone = found.real_batches.micro_batch_alone
    assert (found.upper_bound_by, found.real_batches.batches) == ("run", 6)
    assert heard.sizes[-1] == found.micro_batch < alone
    assert f"{alone} fits on the longest samples alone" in heard.notes[-1]
    assert count_ooms(WORKLOAD, setup, found.micro_batch, target=TARGET, steps=6) == 0
    # One step fewer is what its batches do not survive.
    larger = math.ceil(TARGET / (math.ceil(TARGET / found.micro_batch) - 1))
    assert found.micro_batch < larger <= alone
    assert count_ooms(WORKLOAD, setup, larger, target=TARGET, steps=12) > 0


def test_a_limit_that_real_batches_survive_stays(tmp_path: Path) -> None:
    found, heard = limit_of(simulated_setup(WORKLOAD, tmp_path, "40MiB"), None, tmp_path)
    assert found.micro_batch == found.real_batches.micro_batch_alone == max(heard.sizes)
    assert not any("fragment" in note for note in heard.notes)


def test_equal_samples_and_allocators_without_a_cache_need_no_check(tmp_path: Path) -> None:
    equal = ragged_workload(train_data=tokens(), collate=None, size_of=None)
    for setup in (simulated_setup(equal, tmp_path, "40MiB"), make_setup(WORKLOAD)):
        process = ThisProcess(setup)
        assert survive_real_batches(process, probe_of(8), 24, 0, Listener()) == probe_of(8)


def survived(workload: Any, home: Path, limit: int, budget: str = "40MiB") -> tuple[Probe, list[str]]:
    process, listener = ThisProcess(simulated_setup(workload, home, budget)), Listener()
    return survive_real_batches(process, probe_of(limit), TARGET, 0, listener), listener.notes


def test_a_size_that_nothing_survives_is_not_returned_without_a_note(tmp_path: Path) -> None:
    """The longest sample alone takes more than the budget."""
    found, notes = survived(WORKLOAD, tmp_path, 128, "1MiB")
    assert (found.real_batches.batches, found.micro_batch) == (0, 15)
    assert "not even 15 survives" in notes[0]


def test_a_smaller_size_that_fails_alone_is_not_the_answer(tmp_path: Path, monkeypatch) -> None:
    """Real batches survive at 64 and at 43; of the longest samples, only 32 fit."""
    reasons = iter(["too large", None, None, None])
    monkeypatch.setattr(real_batches, "why_not", lambda *_: next(reasons))
    real = real_batches.run_attempt
    sizes = []

    def attempt(process: ThisProcess, size: int, progress: Progress) -> Any:
        sizes.append(size)
        return real(process, 400 if size > 32 else 8, progress)

    monkeypatch.setattr(real_batches, "run_attempt", attempt)
    found, notes = survived(WORKLOAD, tmp_path, 128)
    assert (sizes, found.micro_batch, found.oom_count) == ([64, 43, 32], 32, 2)
    assert "32 survives 6 batches" in notes[0]


def test_batches_that_raise_leave_the_limit_with_a_note(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        if len(samples) == 43:
            raise ValueError("43 is unlucky")
        return WORKLOAD.collate(samples)

    workload = ragged_workload(model=wide_model, train_data=Sequences(512, 59), collate=collate)
    found, notes = survived(workload, tmp_path, 43)
    assert found == probe_of(43)
    assert "not checked" in notes[0]
    assert "unlucky" in notes[0]


def test_the_first_samples_of_a_stream_are_its_first_batches(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Sequences(samples=512, longest=59))

    workload = ragged_workload(model=wide_model, train_data=Stream())
    options = options_from(
        "plan", {"target_batch": 32, "device": "sim:t4", "memory_budget": "40MiB", "split": "auto"}
    )
    found = run_command(Run(workload=workload, options=options)).probe
    assert found.real_batches.batches == 6


def test_an_interrupt_keeps_the_limit_of_the_longest_samples(tmp_path: Path, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(real_batches, "why_not", interrupted)
    process, listener = ThisProcess(simulated_setup(WORKLOAD, tmp_path, "40MiB")), Listener()
    stopped = probe_of(30, stopped_by="time limit")
    assert survive_real_batches(process, stopped, 256, 0, listener) == stopped
    probe = survive_real_batches(process, probe_of(30), 256, 0, listener)
    assert (probe.micro_batch, probe.stopped_by) == (30, "interrupt")
    assert "not checked" in listener.notes[0]


def test_a_sample_that_does_not_fit_alone_is_named_before_training() -> None:
    class WithOutlier(Sequences):
        def __getitem__(self, index: int):
            if index == 17:
                return torch.ones(40_000, dtype=torch.long), torch.ones(40_000, dtype=torch.long)
            return super().__getitem__(index)

    workload = ragged_workload(model=wide_model, train_data=WithOutlier(samples=64, longest=9))
    options = options_from(
        "plan", {"target_batch": 16, "device": "cpu", "memory_budget": "32MiB", "split": "count"}
    )
    run = Run(workload=workload, options=options)
    with pytest.raises(
        DoesNotFitError, match="sample 17 of the training data, the largest: its size is 40000"
    ) as caught:
        run_command(run)
    assert caught.value.exit_code == 3
    assert "cut shorter or left out" in str(caught.value)
