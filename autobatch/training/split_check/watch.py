"""Watch over the first batches of a run: splitting them must not change their gradients.

The check before training sees samples that it chose, in eval mode. Here are the batches that the run really
trains, in the run's order, with its weights, and the terms of a loss that only training has. In each of the
first batches the odd samples (rare classes, short texts, masks) are compared with parts of one sample; in one
of them as much of the batch as memory and time allow is compared whole.

Between two steps the comparison leaves everything as it was: weights, buffers, gradients, random generators,
the loss scale, the order of the data. Afterwards the run costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

from autobatch.core.errors import InputError
from autobatch.core.records.training import StepRecord
from autobatch.device.host import host_memory
from autobatch.device.oom import first_line, is_oom
from autobatch.setup.attempt import TrainSetup
from autobatch.training.loop import Loop
from autobatch.training.split_check.compare_modes import Finding, compare_samples, modes_of_training
from autobatch.training.split_check.odd_samples import odd_samples, odd_sizes
from autobatch.workload.data import COLLATE, collate_samples, fetch
from autobatch.workload.nested import tensors_of
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import describe, failed_part

WATCHED_BATCHES = 8
CANDIDATES = 256
"""Samples of a batch that odd ones are chosen from."""
FEW_SAMPLES = 32
"""Samples that the odd ones of a batch are compared with."""
SECONDS = 5.0
TIME_SHARE = 0.01
"""Time that the watch may take: these seconds, or this share of the run if that is more."""
COPIES = 6
"""Copies of a batch on the host while it is compared: samples, whole, parts, cuts, and copies to run on."""
HOST_SHARE = 0.25
"""Share of the available host memory that these copies may take."""


class SplitWatch:
    """Compares real batches with their parts while the first of them are trained.

    Args:
        setup: the workload and the device.
        check: raise an error or call ``note`` if a batch and its parts differ.
        note: called with each note for the user.
        before: what the check before training found.
    """

    def __init__(
        self,
        setup: TrainSetup,
        *,
        check: Literal["error", "note"],
        note: Callable[[str], None],
        before: Finding,
    ) -> None:
        self._setup = setup
        self._check = check
        self._note = note
        self._is_told = before.unchecked is not None
        """Whether the user knows that the loss cannot be checked."""
        self._is_done = before.fault is not None
        self._modes = modes_of_training(setup)
        """The modes that are left to try."""
        self._seconds = 0.0
        self._step_seconds = 0.0
        self._seconds_each = math.inf
        """Time that the last comparison of few samples took, per sample."""

    def run(self, loop: Loop) -> Iterator[StepRecord]:
        """Train the remaining batches of a loop, and look at the first of them before they are trained.

        Raises:
            InputError: a batch and its parts differ, and the check is ``error``.
        """
        records = loop.run()
        left = loop.sampler.total - loop.batches_seen
        for number, batch in enumerate(islice(loop.sampler.preview(loop.batches_seen), WATCHED_BATCHES)):
            if self._is_done:
                break
            # By the second batch the weights have changed, and the time of a step is known.
            self._look(loop, batch, is_whole=number == min(1, left - 1), left=left - number)
            record = next(records, None)
            if record is None:
                return
            self._step_seconds = record.seconds
            yield record
        yield from records

    def _look(self, loop: Loop, batch: GlobalBatch, *, is_whole: bool, left: int) -> None:
        allowed = max(SECONDS, TIME_SHARE * left * self._step_seconds)
        if len(batch.ids) <= loop.micro_batch or (self._seconds > allowed and not is_whole):
            return
        start = self._setup.clock()
        short: Finding | None = None
        with preserved_random_state(), loop.meter.uncounted():
            try:
                self._judge(self._compare_few(loop, batch.ids), batch)
                if is_whole and not self._is_done:
                    self._compare_whole(loop, batch, max(allowed - self._seconds, SECONDS))
            except Exception as error:
                if failed_part(error) == COLLATE:
                    short = Finding(unchecked=f"for more samples than a micro-batch has, {describe(error)}")
                elif is_oom(error):
                    reason = f"memory ran out: {first_line(error).rstrip('.')}"
                    short = Finding(unchecked=reason, is_memory=True)
                else:
                    raise
        # The run itself may fit: it trains on, and nothing holds the samples any more.
        if short is not None:
            self._judge(short, batch)
        if loop.device.allocator_config is not None:
            loop.device.release()
        # The peaks of a GPU count from the beginning of its last session.
        with loop.device.training():
            self._seconds += self._setup.clock() - start

    def _compare_few(self, loop: Loop, ids: Sequence[int]) -> Finding:
        """Compare the odd samples of a batch, in parts of their own, with some of the others."""
        workload = self._setup.workload
        samples = fetch(workload.train_data, ids[:CANDIDATES])
        collated = collate_samples(list(samples), workload.collate, option="Workload(collate=…)")
        odd = odd_samples(collated, len(samples))
        del collated
        taken = set(odd)
        rest = [sample for place, sample in enumerate(samples) if place not in taken]
        samples = [*(samples[place] for place in odd), *rest]
        for size in _halves(max(2, min(len(samples), loop.micro_batch, FEW_SAMPLES))):
            start = self._setup.clock()
            found = self._compare(loop, samples[:size], min(len(odd), size // 2))
            if not found.is_memory:
                self._seconds_each = (self._setup.clock() - start) / size
                break
        return found

    def _compare_whole(self, loop: Loop, batch: GlobalBatch, allowed: float) -> None:
        """Compare as many samples of a batch as time and memory allow, and say how many if not all."""
        number, few = len(batch.ids), min(loop.micro_batch, FEW_SAMPLES)
        size, reason = number, "memory"
        if number * self._seconds_each > allowed:
            size, reason = int(allowed / self._seconds_each), "time"
        if (most := _most_on_host(self._setup, batch.ids)) < size:
            size, reason = most, "host memory"
        compared = few
        samples = fetch(self._setup.workload.train_data, batch.ids[:size]) if size > few else []
        for some in _halves(len(samples)):
            if some <= few:
                break
            found = self._compare(loop, samples[:some], 0)
            if not found.is_memory:
                compared = some
                self._judge(found, batch)
                break
            reason = "memory"
        if compared < number and not self._is_done:
            self._note(
                f"compared a batch with its micro-batches on {compared:,} of its {number:,} samples: more "
                f"at once would take too much {reason}"
            )

    def _compare(self, loop: Loop, samples: list[Any], odd: int) -> Finding:
        """Compare samples, of which the first ``odd`` are in parts of their own, within the memory budget."""
        sizes = odd_sizes(len(samples), odd, min(loop.micro_batch, len(samples) // 2))
        train_state = loop.train_state
        with loop.device.enforced() as meter:
            meter.count([*train_state.model.parameters(), *train_state.model.buffers()])
            for optimizer in train_state.optimizers:
                meter.count(tensors_of(list(optimizer.state.values())))
            if train_state.average is not None:
                meter.count(train_state.average.tensors())
            found, mode = compare_samples(self._setup, meter, samples, self._modes, sizes)
            if mode is not None:
                self._modes = self._modes[self._modes.index(mode) :]
            in_eval = [one for one in self._modes if not one.train_mode]
            if mode is not None and mode.train_mode and found.unchecked is not None and in_eval:
                self._tell(found)
                self._modes = in_eval
                found, _ = compare_samples(self._setup, meter, samples, in_eval, sizes)
        if found.is_memory:
            loop.device.release()
        return found

    def _judge(self, found: Finding, batch: GlobalBatch) -> None:
        """Raise or note what was found, once."""
        self._is_done = found.fault is not None or found.unchecked is not None
        if found.fault is not None:
            fault = f"{found.fault} (found in batch {batch.index + 1} of the run)"
            if self._check == "error":
                raise InputError(f"{fault}. To train anyway, use --split-check note")
            self._note(fault)
        else:
            self._tell(found)

    def _tell(self, found: Finding) -> None:
        """Say that the loss cannot be checked, unless that is known."""
        if found.unchecked is not None and not self._is_told:
            self._is_told = True
            self._note(f"while training, {found.notes(is_split=True)[0]}")


def _halves(size: int) -> Iterator[int]:
    """Yield a size, its half and so on down to 2."""
    while size >= 2:
        yield size
        size //= 2


def _most_on_host(setup: TrainSetup, ids: Sequence[int]) -> int:
    """Return how many samples the host can hold several copies of."""
    available = host_memory().available_bytes
    (sample,) = fetch(setup.workload.train_data, ids[:1])
    each = sum(tensor.nbytes for tensor in tensors_of(sample)) * COPIES
    return len(ids) if available is None or not each else int(HOST_SHARE * available / each)
