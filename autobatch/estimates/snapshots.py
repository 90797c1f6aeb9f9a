"""Memory snapshots of a program that ran: where its memory went, and what would fit elsewhere.

    one:          Recording ─replay─► peaks, what lives there, the GPUs on which it would have run
    two or three: Recordings ─align─► Program ─replay─► the largest size on each GPU

Nothing is traced and no device is touched. Recorded are all blocks of torch's allocator, whoever took them.
Not seen is what is allocated elsewhere: the context of CUDA, for which a budget leaves room, and NCCL.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.options import Options, refuse
from autobatch.core.records import Estimate, Recorded, Refusal
from autobatch.core.text import quoted
from autobatch.core.units import format_bytes
from autobatch.device.allocator import Allocator, CachingAllocator, segment_bytes
from autobatch.device.cuda import unmodelled_options
from autobatch.device.profiles import HardwareProfile
from autobatch.device.trace import (
    OutOfMemory,
    Recording,
    Replay,
    Stack,
    Trace,
    line_of,
    read_recordings,
    replay,
)
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.estimator import helpful, with_remedies
from autobatch.estimates.gpus import Budget, Gpus
from autobatch.estimates.traced_step import MARGIN, Footprint
from autobatch.footprint.program import align
from autobatch.planning import equal_parts_note, program_plan
from autobatch.report.facts import plural
from autobatch.report.result import Estimates

MOST_LINES = 12
"""Lines of the program in an explanation, those with the most bytes."""
MOST_GUESSED = 1 / 3
"""Share of a peak that may be taken as it is in the largest recording."""
NOTED_SHARE = 0.01
"""Share of a peak by which a replay may differ from its recording without a note."""
CHANGES = ("sequence", "lora", "checkpointing", "parallel", "precision")
"""Options that change what runs."""
_SIZED = re.compile(r"([1-9][0-9]{0,8})=(.+)", re.DOTALL)


def estimate_snapshots(options: Options) -> Estimates:
    """Predict what fits from memory snapshots of a program, or explain a single one.

    Args:
        options: those of ``estimate``, with one to three snapshots: three sizes give a parabola.

    Raises:
        InputError: a file or an option is invalid, or the recordings part too far.
        DoesNotFitError: not even a size of 1 fits on any of the GPUs.
    """
    refuse(options, CHANGES, "--snapshot says what ran: record the program with that change")
    start, gpus = time.perf_counter(), Gpus(options)
    if len(options.snapshot) == 1:
        named = _SIZED.fullmatch(options.snapshot[0])
        return _explained(Path(named[2] if named else options.snapshot[0]), gpus)
    recordings, notes = _read(options.snapshot)
    program = _Program(recordings, options, gpus)
    found = run_in_copies([partial(program.estimate, gpu) for gpu in gpus.asked])
    seconds = time.perf_counter() - start
    found = [msgspec.structs.replace(estimate, seconds=seconds) for estimate in found]
    notes += program.notes
    for estimate in found:
        note = estimate.plan and equal_parts_note(estimate.plan, estimate.micro_batch)
        notes += [f"{estimate.profile}: {note}"] if note else []
    notes += gpus.notes(found)
    return with_remedies(found, notes, gpus, lambda gpu: helpful(program.step, [], program.budget(gpu)))


def _read(snapshots: Sequence[str]) -> tuple[dict[int, Recording], list[str]]:
    """Read ``N=FILE`` each. Return the recordings by size, the smallest first, and what they hide.

    Raises:
        InputError: one has no size or that of another, or is invalid, or there are too few or too many.
    """
    files = {int(match[1]): Path(match[2]) for match in map(_SIZED.fullmatch, snapshots) if match}
    if len(files) != len(snapshots) or len(files) not in (2, 3):
        raise InputError(
            "give one snapshot, or two or three with different sizes (--snapshot 8=b8.pickle --snapshot "
            f"16=b16.pickle), found {', '.join(map(quoted, snapshots))}"
        )
    recordings: dict[int, Recording] = {}
    notes: list[str] = []
    for size, path in sorted(files.items()):
        gpus = read_recordings(path)
        index = next(iter(recordings.values()), gpus[0]).device
        recordings[size] = recording = next((gpu for gpu in gpus if gpu.device == index), gpus[0])
        if recording.refused is not None:
            raise InputError(f"{path} ended out of memory, so its step is not whole: record a size that fits")
        notes += _hidden(recording, str(path))
    return recordings, notes


def _hidden(recording: Recording, name: str) -> Iterator[str]:
    """Yield what a recording hides, one line each."""
    blocks, size = recording.older
    if blocks:
        yield (
            f"{name} begins in the middle: {plural(blocks, 'block')} ({format_bytes(size)}) of it "
            f"{'is' if blocks == 1 else 'are'} older. Either the recording began late, or more happened than "
            "it keeps (max_entries), and an earlier peak is not in it"
        )
    if recording.private_bytes:
        yield (
            f"{name}: {format_bytes(recording.private_bytes)} are in private pools of CUDA graphs or "
            "MemPool, which a replay takes for pools that never shrink, and does not know of torch 2.11"
        )
    unknown = unmodelled_options({"PYTORCH_ALLOC_CONF": recording.settings})
    if unknown:
        yield f"{name} was recorded with {', '.join(unknown)}, which a replay does not know"


def _explained(path: Path, gpus: Gpus) -> Estimates:
    """Explain a single recording, that of the GPU that reserved most."""
    recording, *others = read_recordings(path)
    notes = [*_hidden(recording, str(path))]
    if others:
        notes.append(f"{path} has {len(others) + 1} GPUs, and this is GPU {recording.device}")
    whole, refused = recording.trace, recording.refused
    # The last event of a recording that ended out of memory is the request that was refused.
    ran = whole if refused is None else replace(whole, events=whole.events[:-1])

    def replayed(trace: Trace, *, expandable: bool = recording.is_expandable) -> Replay:
        return replay(trace, CachingAllocator(None, expandable))

    held, peak = replayed(ran), recording.peak_reserved_bytes
    notes += _differences(peak, held.peak_reserved_bytes or 0, str(path))
    needed = peak if refused is None else replayed(whole).peak_reserved_bytes or 0
    expandable = replayed(whole, expandable=True).peak_reserved_bytes or 0
    end = held.peak_at if refused is None else len(ran.events)
    budgets = {gpu.name: gpus.budget(gpu).budget_bytes for gpu in gpus.asked}
    recorded = Recorded(
        file=str(path),
        peak_allocated_bytes=held.peak_allocated_bytes,
        peak_reserved_bytes=peak,
        needed_bytes=needed,
        expandable_bytes=expandable,
        memory=_by_line(ran.live_after(end), recording.stacks),
        fits={gpu: needed <= budget for gpu, budget in budgets.items()},
        fits_expandable={gpu: expandable <= budget for gpu, budget in budgets.items()},
        refused=None if refused is None else _refusal(refused, held.allocated_bytes),
    )
    return Estimates(estimates=[], notes=notes, recorded=recorded)


def _refusal(refused: OutOfMemory, allocated: int) -> Refusal:
    """Return why a request was refused, with what was allocated then."""
    unused = refused.reserved - allocated
    is_limited = segment_bytes(refused.asked) <= refused.free
    is_enough = refused.asked <= unused + refused.free
    reason: Literal["fragmented", "limited", "full"] = "fragmented" if is_enough else "full"
    if is_limited and refused.asked > unused:
        reason = "limited"
    return Refusal(
        asked_bytes=refused.asked,
        device_free_bytes=refused.free,
        allocated_bytes=allocated,
        reserved_bytes=refused.reserved,
        reason=reason,
    )


class _Program:
    """Predictions for a program that was recorded at several sizes, the smallest first.

    Raises:
        InputError: the recordings part too far.
    """

    def __init__(self, recordings: dict[int, Recording], options: Options, gpus: Gpus) -> None:
        self._options, self._gpus = options, gpus
        self._size, self._largest = max(recordings.items())
        self._new_allocator = partial(CachingAllocator, expandable=self._largest.is_expandable)
        program, unpaired = align(recordings)
        trace = program.at(self._size)
        outcome = replay(trace, self._new_allocator(None))
        live = trace.live_after(outcome.peak_at)
        self._apart_bytes = sum(live[block] for block in unpaired & live.keys())
        """Bytes at the peak of the largest recording that are taken as they are there."""
        share = self._apart_bytes / sum(live.values())
        if share > MOST_GUESSED:
            raise InputError(
                f"the recordings part too far: {format_bytes(self._apart_bytes)} ({share:.0%}) of what is "
                f"live at the peak of {self._size} are not in all of them, or grow by no rule. Record the "
                "same steps of the same program, at sizes that are closer"
            )
        recorded, replayed = self._largest.peak_reserved_bytes, outcome.peak_reserved_bytes or 0
        margin = max(MARGIN, abs(replayed - recorded) / recorded)
        self.step = Footprint(program, margin, multiple=options.micro_batch_multiple)
        self.notes = [*_differences(recorded, replayed, f"at {self._size}")]
        """What limits a prediction, one line each."""
        if unpaired:
            lives = "are not live at the peak"
            if self._apart_bytes:
                lives = f"are {share:.0%} of the peak. Recordings at larger sizes say more"
            self.notes.append(
                f"{plural(len(unpaired), 'block')} of {len(self._largest.stacks):,} are not in all "
                f"recordings, or grow by no rule: taken as at {self._size}, where they {lives}"
            )

    def budget(self, gpu: HardwareProfile) -> Budget:
        """Return the budget of a GPU, whose allocator has segments as in the recording."""
        return self._gpus.budget(gpu)._replace(new_allocator=self._new_allocator)

    def estimate(self, gpu: HardwareProfile) -> Estimate:
        """Predict what fits on one GPU."""
        budget, world = self.budget(gpu), self._gpus.world
        asked, target = self._options.micro_batch, self._options.target_batch
        found = budget.predict(self.step, asked)
        trace = self.step.program.at(max(1, found.micro_batch))
        live = trace.live_after(replay(trace, Allocator()).peak_at)
        if self._apart_bytes:  # they may have grown with the size
            grown = self._apart_bytes * max(1, found.micro_batch / self._size - 1) / budget.budget_bytes
            wider = self.step._replace(margin=min(1.0, self.step.margin + grown))
            found = budget.predict(wider, asked)
        plan = None
        if found.fits and target is not None:
            plan = program_plan(target, found.micro_batch, world_size=world, multiple=self.step.multiple)
        return msgspec.structs.replace(
            found, plan=plan, memory=_by_line(live, self._largest.stacks), world_size=world
        )


def _differences(recorded: int, replayed: int, name: str) -> Iterator[str]:
    """Yield a line if a replay does not reserve what was recorded."""
    if abs(replayed - recorded) > NOTED_SHARE * recorded:
        yield (
            f"{name}: a replay of its blocks reserves {format_bytes(replayed)} at the peak, and the GPU "
            f"reserved {format_bytes(recorded)}"
        )


def _by_line(live: dict[int, int], stacks: Sequence[Stack]) -> dict[str, int]:
    """Return the bytes of live blocks by the line that took them."""
    taken: Counter[str] = Counter()
    for block, size in live.items():
        taken[line_of(stacks[block]) or "without a line"] += size
    shown = dict(taken.most_common(MOST_LINES))
    rest = taken.total() - sum(shown.values())
    return shown | ({"all others": rest} if rest else {})
