"""Runs that loader workers feed: the same weights as without them, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from autobatch import Progress
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.training.checkpoint import load_newest
from autobatch.training.resume import restore_loop
from autobatch.training.run import train
from autobatch.training.run_folder import RunFiles
from tests.support.faults import Fault, Quick, Watching
from tests.support.feeds import augmented, fed_loop
from tests.support.kinds import RUNS, Augmented
from tests.support.options import as_options
from tests.support.training import fingerprint, make_workload, network, points


@pytest.mark.parametrize("kind", ["augmented, averaged", "whole batch"])
def test_a_run_trains_the_same_with_and_without_workers(kind: str) -> None:
    """A collate function that draws is seeded by the first sample of its micro-batch."""

    def noisy(samples):
        inputs, *others = default_collate(samples)
        return inputs + torch.randn(()) + random.random(), *others

    workload, options = RUNS[kind]()
    if kind.startswith("augmented"):
        workload = dataclasses.replace(workload, collate=noisy)
    prints = set()
    for workers in (0, 2):
        with fed_loop(workload, workers=workers, sample_seeds=True, **options) as loop:
            records = list(loop.run())
            assert [record.micro_batch for record in records] == [3] * 6
            prints.add(fingerprint(loop.train_state.model))
    assert len(prints) == 1


def test_a_batch_run_again_in_smaller_micro_batches_has_the_same_samples() -> None:
    """Without batch statistics and dropout, the split changes nothing but rounding."""
    workload = make_workload(
        train_data=Augmented(*(c.double() if c.is_floating_point() else c for c in points().columns))
    )
    with fed_loop(workload, workers=0, sample_seeds=True, micro_batch=7) as straight:
        losses = [record.loss for record in straight.run()]
    fault = Fault()
    options = {"meter": Watching(fault), "device": Quick(memory_budget="1GiB")}
    with fed_loop(workload, workers=0, sample_seeds=True, micro_batch=7, **options) as loop, fault:
        run = loop.run()
        records = [next(run), next(run)]
        fault.armed, fault.count, fault.at = True, 0, {30}
        records.append(next(run))
        fault.armed = False
        records += run
    assert [record.micro_batch for record in records] == [7, 7, 4, 4, 4, 4]
    assert loop.oom_recoveries == 1
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-12)


class TwoSamplesFit(Watching):
    """A meter of a GPU that holds two samples."""

    def count(self, tensors) -> None:
        tensors = list(tensors)
        if len(tensors[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def stats(self) -> MemoryStats:
        return MemoryStats(None, None, None, None, None)


def test_the_stream_of_workers_starts_again_whenever_memory_runs_out() -> None:
    workload = augmented(model=lambda: network(torch.float32))
    with fed_loop(workload, workers=2, micro_batch=7, meter=TwoSamplesFit(None)) as loop:
        records = list(loop.run())
        smaller = fingerprint(loop.train_state.model)
    assert [record.micro_batch for record in records] == [2] * 6
    assert loop.oom_recoveries == 2
    with fed_loop(workload, workers=0, sample_seeds=True, micro_batch=2) as loop:
        list(loop.run())
        assert fingerprint(loop.train_state.model) == smaller


@pytest.mark.parametrize(("first", "then"), [(0, 2), (2, 0)])
def test_a_resumed_run_is_bit_exact_with_other_workers(tmp_path: Path, first: int, then: int) -> None:
    """It resumes at the last checkpoint, one step before the run was stopped."""
    with fed_loop(augmented(), workers=0, sample_seeds=True) as loop:
        list(loop.run())
        expected = fingerprint(loop.train_state.model)
    settings = RunFiles(
        out=tmp_path, options=as_options("fit", target_batch=1, checkpoint_every=2, keep_last=3)
    )

    class Stop(Progress):
        def stepped(self, step, of) -> None:
            if step.step == 5:
                raise KeyError

    with fed_loop(augmented(), workers=first, sample_seeds=True) as loop, pytest.raises(KeyError):
        train(loop, settings, Stop(), None)
    resumed = load_newest(tmp_path / "checkpoints")
    assert resumed.state["counters"]["batches_seen"] == 4
    with fed_loop(augmented(), workers=then, sample_seeds=True) as loop:
        restore_loop(loop, resumed.state, same_hardware=True)
        train(loop, settings, Progress(), resumed)
        assert fingerprint(loop.train_state.model) == expected
