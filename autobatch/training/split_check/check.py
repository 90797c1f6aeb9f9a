"""The checks that splitting a batch does not change its gradient, and what they tell or refuse.

Before training, samples chosen by cost and label are compared: a few first, then more of them if time and
memory allow. Then the first batch that trains is compared with its micro-batches, with the terms of the loss
that only training has. It is kept as it was fetched, so that nothing is read or drawn for the check, and
nothing that the run depends on changes. If samples cannot be compared, the check says so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.records import StepRecord
from autobatch.device.base import Meter
from autobatch.device.host import host_memory
from autobatch.planning import micro_batches, split_evenly
from autobatch.rehearsal.process import Session
from autobatch.rehearsal.setup import Setup
from autobatch.step.train_state import TrainState
from autobatch.training.batchnorm import batch_norm_notes, batch_norms, smallest_micro_batch
from autobatch.training.loop import Loop
from autobatch.training.split_check.compare import Finding, compare, find_written, pass_types
from autobatch.training.split_check.passes import PassType, open_runner
from autobatch.training.split_check.samples import (
    SampleChoice,
    collate_split,
    cut_split,
    join_parts,
)
from autobatch.workload.contract import Collated
from autobatch.workload.data import COLLATE, fetch, load_micro_batch
from autobatch.workload.loader import Feed
from autobatch.workload.nested import cut, tensors_of
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.split import Split
from autobatch.workload.user_code import failed_part

SplitCheck = Literal["error", "note", "off"]
FEW_SAMPLES = 8
MANY_SAMPLES = 64
MOST_PARTS = 8
MOST_MICRO_BATCHES = 4
"""Micro-batches that many samples may be; their memory is enforced."""
MANY_TENSORS = 1000
"""Parameter tensors from which on there are two parts: a pass over a few samples takes seconds then."""
SECONDS = 5.0
"""Expected time above which fewer samples are compared."""
PASSES = 8
"""Steps that a comparison takes as long as: several passes over the samples, in float64."""
COPIES = 4
"""Copies of a kept batch on the host while it is compared with its micro-batches."""
HOST_SHARE = 0.25
"""Share of the available host memory that these copies may take."""
ANYWAY = "To train anyway, use --split-check note"


def check_loss_splits(
    setup: Setup,
    *,
    micro_batch: int,
    sampler: GlobalBatchSampler,
    check: SplitCheck = "error",
    share_of: Callable[[int], int] = lambda samples: samples,
) -> tuple[list[str], Finding]:
    """Check before training that splitting a batch changes nothing but the order of sums.

    Args:
        setup: the workload and its model, which trains on temporary weights here.
        micro_batch: the largest micro-batch of the most expensive samples.
        sampler: the batches of the run.
        check: raise an error or return a note if batches are split and the loss cannot be; ``off`` skips the
            loss and checks only BatchNorm.
        share_of: returns the samples that this process takes of a batch of a given size.

    Returns:
        Notes, one per line; and what was found about the loss.

    Raises:
        InputError: batches are split and the loss cannot be, or a BatchNorm gets a single value.
    """
    notes = batch_norm_notes(setup.model, sampler, micro_batch)
    share = share_of(sampler.target_batch)
    is_split = min(micro_batch, share) < sampler.target_batch
    if batch_norms(setup.model) and smallest_micro_batch(sampler, micro_batch, share_of) == 1:
        with preserved_random_state(), setup.device.training() as meter:
            _check_single_sample(setup, meter, sampler)
    finding = Finding()
    if check != "off":
        finding = examine_loss(setup, micro_batch, len(micro_batches(share, micro_batch)))
    setup.device.release()
    if finding.fault is not None and is_split and check == "error":
        raise InputError(f"{finding.fault}. {ANYWAY}")
    return [*notes, *finding.notes(is_split=is_split)], finding


def examine(session: Session, micro_batch: int, steps: int) -> Finding:
    """Examine the loss of an open setup; see `examine_loss`."""
    return examine_loss(session.setup, micro_batch, steps)


def examine_loss(setup: Setup, micro_batch: int, steps: int) -> Finding:
    """Examine what splitting a batch into ``steps`` micro-batches changes; no state is changed.

    As many samples are compared as memory and time allow, of which ``micro_batch`` fit.
    """
    with preserved_random_state():
        choice = SampleChoice(setup)
        few = min(FEW_SAMPLES, len(choice), max(2, micro_batch))
        many = min(MANY_SAMPLES, len(choice), MOST_MICRO_BATCHES * micro_batch)
        if few < 2:
            return Finding(unchecked="it takes 2 samples, and the training data have 1")
        start = setup.clock()
        samples = fetch(setup.workload.train_data, choice.ids(few))
        with setup.device.training() as meter:
            split = collate_split(setup.workload, samples, _sizes(setup, few))
            finding, kind = compare(setup, meter, split, pass_types(setup, in_training=False))
            expected = (setup.clock() - start) * many / few
            written = find_written(setup, meter, split, steps)
        if finding.fault is None and kind is not None and few < many and expected <= SECONDS:
            of_many = _compare_many(setup, choice.ids(many), kind)
            if of_many is not None and (of_many.fault is not None or finding.unchecked is not None):
                finding = of_many
    return written.explaining(finding)


def _sizes(setup: Setup, samples: int) -> list[int]:
    """Return the sizes of the parts that samples are compared in."""
    has_many = sum(1 for _ in setup.model.parameters()) >= MANY_TENSORS
    return split_evenly(samples, 2 if has_many else max(2, min(MOST_PARTS, samples // 2)))


def _compare_many(setup: Setup, ids: list[int], kind: PassType) -> Finding | None:
    """Compare more samples within the memory budget; None if the collate function refuses so many."""
    samples = fetch(setup.workload.train_data, ids)
    try:
        split = collate_split(setup.workload, samples, _sizes(setup, len(samples)))
    except Exception as error:
        if failed_part(error) != COLLATE:
            raise
        return None
    with setup.device.enforced() as meter:
        return compare(setup, meter, split, [kind])[0]


class KeptBatch(Feed):
    """A feed that keeps copies of the newest batch, as far as a share of the host memory allows.

    Args:
        feed: makes the micro-batches.
        split: forms them.
    """

    def __init__(self, feed: Feed, split: Split) -> None:
        self._feed = feed
        self._split = split
        self.micro_batches: list[tuple[Collated, int]] = []
        """With their numbers of samples."""
        self._left = 0.0

    @property
    def seeds_samples(self) -> bool:
        """See `Feed.seeds_samples`."""
        return self._feed.seeds_samples

    def collated(self, batch: GlobalBatch, micro_batch: int) -> Iterator[Collated]:
        """See `Feed.collated`."""
        available = host_memory().available_bytes
        self._left = math.inf if available is None else HOST_SHARE * available / COPIES
        self.micro_batches.clear()
        sizes = [len(part.ids) for part in self._split.parts(batch, micro_batch)]
        return map(self._keep, self._feed.collated(batch, micro_batch), sizes)

    def _keep(self, micro_batch: Collated, size: int) -> Collated:
        """Keep a copy of a micro-batch, because a loss may change its own."""
        self._left -= sum(tensor.nbytes for tensor in tensors_of(micro_batch))
        if self._left >= 0:
            try:
                self.micro_batches.append((copy.deepcopy(micro_batch), size))
            except Exception:  # what cannot be copied is not compared
                self._left = -math.inf
        return micro_batch


@dataclass(frozen=True)
class FirstBatch:
    """The first batch of a run, compared with its micro-batches before its record is out."""

    setup: Setup
    """The workload and the device; it has the model of the run."""
    check: SplitCheck
    """Raise an error or call ``note`` if the batch and its micro-batches differ."""
    note: Callable[[str], None]
    """Called with each note for the user."""
    before: Finding
    """What the check before training found."""

    def run(self, loop: Loop) -> Iterator[StepRecord]:
        """Train the remaining batches of a loop, and look at the first of them.

        Raises:
            InputError: the first batch and its micro-batches differ, and the check is ``error``.
        """
        records = loop.run()
        if self.check != "off" and self.before.fault is None and not self.before.writes:
            feed = loop.feed
            kept = loop.feed = KeptBatch(feed, loop.split)
            try:
                record = next(records, None)
            finally:
                loop.feed = feed
            if record is None:
                return
            if record.accumulation_steps > 1:
                self._judge(self._compare(loop, kept, record))
            del kept
            yield record
        yield from records

    def _compare(self, loop: Loop, kept: KeptBatch, record: StepRecord) -> Finding:
        """Compare as many samples of the batch as time and memory allow."""
        finding, kind = Finding(), None
        with preserved_random_state(), loop.meter.uncounted():
            whole, sizes = join_parts(kept.micro_batches)
            most = max(FEW_SAMPLES, int(SECONDS * sum(sizes) / (PASSES * max(record.seconds, 1e-9))))
            while kind is None and min(sum(sizes), most) >= 2:
                if sum(sizes) > most or len(sizes) < 2:
                    sizes = _sizes(self.setup, min(sum(sizes), most))
                    whole = cut(whole, slice(sum(sizes)))
                split = cut_split(whole, sizes)
                with loop.device.enforced() as meter:
                    meter.count(_tensors_of(loop.train_state))
                    finding, kind = compare(
                        self.setup, meter, split, pass_types(self.setup, in_training=True)
                    )
                most = sum(sizes) // 2
                if kind is None:
                    loop.device.release()
        if loop.device.allocator_config is not None:
            # A probe starts with an empty cache, and so does the next step.
            loop.device.release()
        with loop.device.training():  # the peaks of a GPU count from the beginning of its last session
            return finding if kind is not None else Finding()

    def _judge(self, found: Finding) -> None:
        """Raise or note what was found; what could not be checked before is known."""
        if found.fault is not None:
            fault = f"{found.fault} (found in the first batch of the run)"
            if self.check == "error":
                raise InputError(f"{fault}. {ANYWAY}")
            self.note(fault)
        elif found.unchecked is not None and self.before.unchecked is None:
            self.note(f"while training, {found.notes(is_split=True)[0]}")


def _tensors_of(train_state: TrainState) -> Iterator[Tensor]:
    """Yield what training holds on the device besides gradients."""
    yield from (*train_state.model.parameters(), *train_state.model.buffers())
    for optimizer in train_state.optimizers:
        yield from tensors_of(list(optimizer.state.values()))
    if train_state.average is not None:
        yield from train_state.average.tensors()


def _check_single_sample(setup: Setup, meter: Meter, sampler: GlobalBatchSampler) -> None:
    """Raise if BatchNorm cannot train on a single sample, rather than in the last step of the run."""
    try:
        with open_runner(setup, meter, PassType(None, True)) as runner:
            runner.model.train()
            runner.run(load_micro_batch(setup.workload, [0]), 1)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            return
        last = sampler.size(sampler.total - 1)
        raise InputError(
            f"BatchNorm needs 2 samples, and this run has a micro-batch of 1 (its last batch has {last} "
            "samples): choose a target batch that leaves no single sample, --last-batch drop, or --steps "
            "instead of --epochs"
        ) from None
    except Exception:  # other errors occur in training too, and are reported there
        return
