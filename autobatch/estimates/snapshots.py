"""Memory snapshots of a program that ran: where its memory went, and what would fit elsewhere.

    one:          Recording ─replay─► peaks, what lives there, the GPUs on which it would have run
    two or three: Recordings ─align─► Program ─replay─► the largest size on each GPU

Nothing is traced and no device is touched. Recorded are all blocks of torch's allocator, whoever took them.
Not seen is what is allocated elsewhere: the context of CUDA, for which a budget leaves room, and NCCL.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.options import Options, refuse
from autobatch.core.records import Recorded, Refusal
from autobatch.core.text import quoted
from autobatch.core.units import format_bytes
from autobatch.device.allocator import AllocatorConfig, CachingAllocator
from autobatch.device.cuda import unmodelled_options
from autobatch.device.snapshot_file import OutOfMemory, Recording, read_recordings
from autobatch.device.trace import Replay, Trace, replay
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.estimator import helpful, with_remedies
from autobatch.estimates.gpus import Gpus
from autobatch.estimates.recorded_program import RecordedProgram, by_line, differences
from autobatch.planning import equal_parts_note
from autobatch.report.result import Estimates
from autobatch.report.words import plural

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
    program = RecordedProgram(recordings, options, gpus)
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
        return replay(trace, CachingAllocator(None, AllocatorConfig(expandable_segments=expandable)))

    held, peak = replayed(ran), recording.peak_reserved_bytes
    notes += differences(peak, held.peak_reserved_bytes or 0, str(path))
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
        memory=by_line(ran.live_after(end), recording.stacks),
        fits={gpu: needed <= budget for gpu, budget in budgets.items()},
        fits_expandable={gpu: expandable <= budget for gpu, budget in budgets.items()},
        refused=None if refused is None else _refusal(refused, held.allocated_bytes),
    )
    return Estimates(estimates=[], notes=notes, recorded=recorded)


def _refusal(refused: OutOfMemory, allocated: int) -> Refusal:
    """Return why a request was refused, with what was allocated then."""
    unused = refused.reserved - allocated
    is_limited = AllocatorConfig().segment_bytes(refused.asked) <= refused.free
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
