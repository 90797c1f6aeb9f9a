"""One batch over all ranks with the engine that trains, in children that can be thrown away.

A probe runs the steps of each rank alone, which no rank can block. That the same sizes fit beside the buffers
of real collectives, this shows: two steps of the plan's own micro-batches, within the budget of each rank. If
memory runs out on one rank, its child says so, and all children end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

import msgspec

from autobatch.core.knobs import Value
from autobatch.core.records.probe import Attempt
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.distributed.shares import RankSplit
from autobatch.setup.attempt import TrainSetup, batches_of, on_copies, step_anyway
from autobatch.setup.child import ChildCrashed, Session, SetupProcess
from autobatch.setup.setup import with_knobs
from autobatch.step.loss_share import StepTotals
from autobatch.step.train_step import accumulate, finish
from autobatch.workload.contract import Collated
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import to_device
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.split import CountSplit

if TYPE_CHECKING:
    from autobatch.distributed.engine import Engine
    from autobatch.distributed.meeting import Children, MeetingPlace
    from autobatch.distributed.sharding.engine import Share
    from autobatch.step.train_state import TrainState

GradSync: TypeAlias = Literal["auto", "overlap", "after"]
STEPS = 2
"""Steps of the batch: the state of the optimizer appears in the first."""
MOST_PARTS = 2
"""Micro-batches of a step: gradients are there while the second runs."""
SPARE_SAMPLES = 2
"""Samples of a micro-batch that counts nothing: BatchNorm needs two."""


class JointBatch(NamedTuple):
    """A batch over all ranks: plain values."""

    rank: int
    samples: int
    """Samples of all ranks."""
    limits: list[int]
    """Largest micro-batch of each rank."""
    grad_sync: GradSync

    def split(self) -> RankSplit:
        """Return the split of this rank."""
        return RankSplit(CountSplit(), self.rank, self.limits)

    def whole(self) -> GlobalBatch:
        """Return the batch of all ranks."""
        return GlobalBatch(0, 0, list(range(self.samples)))

    def places(self) -> list[Sequence[int]]:
        """Return the places of the samples in each micro-batch of this rank; none if it takes no sample."""
        return [part.places for part in self.split().parts(self.whole(), self.limits[self.rank])]

    def sizes(self) -> list[int]:
        """Return the samples of each micro-batch of this rank."""
        return [len(places) for places in self.places()]


def joint_batch(of_ranks: Sequence[Sequence[int]], rank: int, grad_sync: GradSync) -> JointBatch:
    """Return a batch with the largest micro-batch of each rank in a plan, up to `MOST_PARTS` times."""
    limits = [max(sizes, default=1) for sizes in of_ranks]
    rounds = min(MOST_PARTS, max(map(len, of_ranks)))
    return JointBatch(rank, rounds * sum(limits), limits, grad_sync)


def run_joint_batch(
    process: SetupProcess,
    place: MeetingPlace,
    batch: JointBatch,
    knobs: Mapping[str, Value] = {},
) -> Attempt:
    """Run a batch over all ranks in the children of each; all ranks call it.

    Args:
        process: holds the setup.
        place: where the children meet.
        batch: what they run.
        knobs: values of the knobs that are not at their default.

    Returns:
        The attempt of this rank. Its ``reason`` is None if it ended because of another rank.
    """
    start = time.perf_counter()
    try:
        found = process.call("a batch over all ranks", _run, place, batch, dict(knobs))
    except ChildCrashed as crash:
        process.restart()
        reason = "the host ran out of memory and ended the child process" if crash.out_of_memory else None
        found = _failed(batch, reason)
    return msgspec.structs.replace(found, seconds=time.perf_counter() - start, world=place.world)


def _failed(batch: JointBatch, reason: str | None, phase: str | None = None) -> Attempt:
    return Attempt(
        micro_batch=max(batch.sizes(), default=0),
        fits=False,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        seconds=0.0,
        reason=reason,
        phase=phase,
    )


@contextmanager
def meet(session: Session, place: MeetingPlace) -> Iterator[Children]:
    """Meet the children of the other ranks within the block. After it, the session runs steps alone."""
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.meeting import met

    try:
        with met(place) as children:
            yield children
    finally:
        setup = session.setup
        if setup.layout is not None:
            # The group that exchanges nothing has ended with the meeting.
            alone = setup.layout.for_probe(setup.device.torch_device.type)
            session.setup = replace(setup, sharding=alone)


def is_lost(error: Exception) -> bool:
    """Return whether another rank has ended a meeting."""
    from autobatch.distributed.messages import RankLost, lost_rank

    return isinstance(error, RankLost) or lost_rank(error) is not None


def _run(session: Session, place: MeetingPlace, batch: JointBatch, knobs: dict[str, Value]) -> Attempt:
    """Run the steps in the child of a rank."""
    setup, phase = with_knobs(session.setup, knobs), "setup"
    failure: tuple[str | None, str] | None = None
    with preserved_random_state(), setup.device.enforced() as meter:

        def mark(name: str) -> None:
            nonlocal phase
            phase = name
            meter.mark(name)

        try:
            with meet(session, place) as children:
                _train(setup, children, batch, meter, mark)
        except Exception as error:
            lost = is_lost(error)
            if classify(error) is Verdict.NONE and not lost:
                raise
            failure = (None if lost else first_line(error), phase)
        stats = meter.stats()
    if failure is not None:
        setup.device.release()
        return _failed(batch, *failure)
    reason = setup.device.refuses(stats)
    return Attempt(
        micro_batch=max(batch.sizes(), default=0),
        fits=reason is None,
        peak_allocated_bytes=stats.peak_allocated_bytes,
        peak_reserved_bytes=stats.peak_reserved_bytes,
        seconds=0.0,
        reason=reason,
    )


def _train(
    setup: TrainSetup, children: Children, batch: JointBatch, meter: Meter, mark: Callable[[str], None]
) -> None:
    """Run the steps over the children of all ranks."""
    sizes, places = batch.sizes(), batch.places()
    mark("setup")
    with joined(setup, children, batch, meter) as (train_state, engine):
        if train_state.scaler is not None:
            # As in an attempt: an overflow would keep the state of the optimizer from appearing.
            train_state.scaler = type(train_state.scaler)(setup.device.torch_device.type, init_scale=1.0)
        for _ in range(STEPS):
            fetched = ((setup.worst_case.batch(size), size) for size in sizes)
            placed = batches_of(setup, meter, fetched)
            parts = engine.passing(train_state, placed, len(sizes), batch.whole())
            totals = accumulate(train_state, parts, batch.samples, mark, places=places, measure_first=True)
            summed = engine.combine(train_state, totals)
            assert isinstance(summed, StepTotals), "a child that fails ends the others"
            result = finish(train_state, summed, mark=mark)
            if not result.applied:
                step_anyway(train_state, mark)
        setup.device.synchronize()


@contextmanager
def joined(
    setup: TrainSetup, children: Children, batch: JointBatch, meter: Meter
) -> Iterator[tuple[TrainState, Engine]]:
    """Return a train state on copies of the model, and the engine over the children that trains it."""
    from autobatch.distributed.choose import choose_engine
    from autobatch.distributed.group import Group
    from autobatch.distributed.sharding.build import mesh_of

    device = setup.device.torch_device
    # The engines use what a group and its children have in common.
    group = cast(Group, children)
    split = batch.split()
    if setup.layout is not None:
        setup = replace(setup, sharding=setup.layout.over(mesh_of(group, device)))
    with on_copies(setup, meter) as train_state:
        if setup.layout is not None:
            yield train_state, share_of(setup, children, split, train_state)
            return
        asked, kinds = batch.grad_sync, list(range(children.world))
        choice = choose_engine(group, split, kinds, train_state, spare=lambda: spare_of(setup), asked=asked)
        yield train_state, choice.engine


def share_of(setup: TrainSetup, children: Children, split: RankSplit, train_state: TrainState) -> Share:
    """Return the engine over the children of ranks that share a model, each of which is of its own kind."""
    from autobatch.distributed.group import Group
    from autobatch.distributed.sharding.engine import Share

    tensors = children.tensor_group(setup.device.torch_device)
    share = Share(cast(Group, children), split, list(range(children.world)), tensors)
    share.attach(train_state, lambda: spare_of(setup))
    return share


def spare_of(setup: TrainSetup) -> tuple[Collated, int]:
    """Return the first samples on the device, for a rank with fewer micro-batches than others."""
    ids = range(min(SPARE_SAMPLES, len(setup.workload.train_data)))  # type: ignore[arg-type]
    return to_device(load_micro_batch(setup.workload, ids), setup.device.torch_device), len(ids)
