"""Memory snapshots of a program that ran: where its memory went, and what would fit elsewhere.

    one:          Recording ─► peaks, what lives there, the GPUs on which it would have run
    two or three: Recordings ─align─► Program ─replay─► the largest size on each GPU

Nothing is traced and no device is touched. Recorded are all blocks of torch's allocator, whoever took them.
Not seen is what is allocated elsewhere: the context of CUDA, for which a budget leaves room, and NCCL.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records import Estimate, Recorded, RecordedFit, Refusal
from autobatch.core.text import quoted
from autobatch.core.units import format_bytes
from autobatch.device.allocator.caching import AllocatorConfig
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.device.cuda_allocator import unmodelled_options
from autobatch.device.profiles import HardwareProfile
from autobatch.device.snapshot_file import OnPools, OutOfMemory, Recording, Stack, read_recordings
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.estimator import need, with_remedies
from autobatch.estimates.footprints import MARGIN, Footprint
from autobatch.estimates.gpus import Gpus, Spending
from autobatch.estimates.suggestions import helpful
from autobatch.footprint.alignment import Aligned, Apart, Sized, align, block_sizes
from autobatch.planning import equal_plan, even_split_note
from autobatch.report.result import Estimates
from autobatch.report.words import count, plural

MOST_SNAPSHOTS = 3
"""More tell no more: three sizes give a parabola."""
MOST_LINES = 12
"""Lines of the program in an explanation, those with the most bytes."""
MOST_GUESSED = 1 / 3
"""Share of a peak that may be taken as it is in the largest recording."""
NOTED_SHARE = 0.01
"""Share of a peak by which a replay may differ from its recording without a note."""
_SIZED = re.compile(r"([1-9][0-9]{0,8})=(.+)", re.DOTALL)
LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "/torch/", "<frozen", "<string>", "?")
"""Parts of the names of files that are not the user's own."""


def estimate_snapshots(options: Options) -> Estimates:
    """Predict what fits from memory snapshots of a program, or explain a single one.

    Args:
        options: those of ``estimate``, with one to three snapshots.

    Raises:
        InputError: a file or an option is invalid, or the recordings part too far.
        DoesNotFitError: not even a size of 1 fits on any of the GPUs.
    """
    for section, name in (("model", ""), ("ranks", "parallel"), ("device", "precision")):
        values = msgspec.structs.asdict(getattr(options, section))
        usual = msgspec.structs.asdict(type(getattr(options, section))())
        given = [each for each in values if values[each] != usual[each] and name in ("", each)]
        if given:
            raise InputError(
                f"--{given[0]} {values[given[0]]} changes what runs, and --snapshot says what ran: record "
                "the program with that change"
            )
    files = _named(options.snapshot)
    gpus = Gpus(options)
    if len(files) == 1:
        ((_, path),) = files
        return _explained(path, gpus)
    sized: list[tuple[int, Recording]] = []
    notes: list[str] = []
    device: int | None = None
    for size, path in sorted(files, key=lambda file: -file[0]):
        recordings = read_recordings(path)
        device = recordings[0].device if device is None else device
        recording = next((each for each in recordings if each.device == device), recordings[0])
        if recording.refused is not None:
            raise InputError(f"{path} ended out of memory, so its step is not whole: record a size that fits")
        notes += _notes(recordings, recording, str(path))
        sized.insert(0, (size, recording))
    return _predicted(sized, options, gpus, notes)


def _named(snapshots: Sequence[str]) -> list[tuple[int, Path]]:
    """Return the sizes and the files of ``[N=]FILE``; a single one has size 0 if none is given.

    Raises:
        InputError: there are too many, or one has no size or that of another.
    """
    sized = [(_SIZED.fullmatch(text), text) for text in snapshots]
    files = [(int(match[1]), Path(match[2])) if match else (0, Path(text)) for match, text in sized]
    sizes = {size for size, _ in files}
    if len(files) > 1 and (len(files) > MOST_SNAPSHOTS or len(sizes) < len(files) or 0 in sizes):
        raise InputError(
            f"give one snapshot, or two or three with different sizes (--snapshot 8=b8.pickle --snapshot "
            f"16=b16.pickle), found {', '.join(map(quoted, snapshots))}"
        )
    return files


def _notes(recordings: Sequence[Recording], recording: Recording, name: str) -> Iterator[str]:
    """Yield what a recording hides, one line each."""
    others = [other for other in recordings if other is not recording]
    if others:
        peaks = ", ".join(f"GPU {other.device} {format_bytes(other.peak_reserved_bytes)}" for other in others)
        yield f"{name}: this is GPU {recording.device}; other peaks: {peaks}"
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


def _live_at(trace: Trace, end: int) -> dict[int, int]:
    """Return the bytes of the blocks that are live after an event, by their numbers."""
    live: dict[int, int] = {}
    for block, size in trace.events[: end + 1]:
        if size == FREE:
            live.pop(block, None)
        else:
            live[block] = size
    return live


def _by_line(live: dict[int, int], stacks: Sequence[Stack]) -> dict[str, int]:
    """Return the bytes of live blocks by the line that took them, of those without a line by their size."""
    lines = {block: line_of(stacks[block]) for block in live}
    alone = Counter(size for block, size in live.items() if not lines[block])
    taken: Counter[str] = Counter()
    for block, size in live.items():
        unknown = f"{plural(alone[size], 'block')} of {format_bytes(size)} without a line"
        taken[lines[block] or unknown] += size
    shown = dict(taken.most_common(MOST_LINES))
    rest = taken.total() - sum(shown.values())
    return shown | ({"all others": rest} if rest else {})


# One recording


def _explained(path: Path, gpus: Gpus) -> Estimates:
    """Explain a single recording."""
    recordings = read_recordings(path)
    recording = recordings[0]
    refused, trace = recording.refused, recording.trace
    # The last event of a recording that ended out of memory is the request that was refused.
    ran = trace if refused is None else Trace(trace.events[:-1])
    outcome = replay(ran, _model(recording))
    notes = [*_notes(recordings, recording, str(path))]
    needed = recording.peak_reserved_bytes
    if refused is not None:
        needed = replay(trace, _model(recording)).peak_reserved_bytes or 0
    else:
        notes += _differences(needed, outcome.peak_reserved_bytes or 0, str(path))
    expandable = needed
    if not recording.is_expandable:
        expandable = replay(trace, _model(recording, expandable=True)).peak_reserved_bytes or 0
    if not any(recording.stacks):
        notes.append(f"{path} has no frames, so its blocks are listed by size")
    at = outcome.peak_at if refused is None else len(ran.events) - 1
    budgets = {gpu.name: gpus.budget(gpu)[0] for gpu in gpus.asked}
    recorded = Recorded(
        file=str(path),
        device=recording.device,
        peak_allocated_bytes=outcome.peak_allocated_bytes,
        peak_reserved_bytes=recording.peak_reserved_bytes,
        needed_bytes=needed,
        expandable_bytes=expandable,
        memory=_by_line(_live_at(ran, at), recording.stacks),
        fits=[
            RecordedFit(
                profile=name,
                budget_bytes=budget,
                fits=needed <= budget,
                fits_expandable=expandable <= budget,
            )
            for name, budget in budgets.items()
        ],
        refused=None if refused is None else _refusal(refused, outcome.allocated_bytes),
    )
    return Estimates(estimates=[], notes=notes, recorded=recorded)


def _model(recording: Recording, *, expandable: bool = False) -> OnPools:
    """Return an empty model of the allocator for the blocks of a recording, without a limit."""
    return OnPools(None, recording.pools, expandable=expandable or recording.is_expandable)


def _refusal(refused: OutOfMemory, allocated: int) -> Refusal:
    """Return why a request was refused, with what was allocated then."""
    unused = refused.reserved - allocated
    reason: Literal["fragmented", "limited", "full"] = "full"
    if refused.asked <= unused:
        reason = "fragmented"
    elif AllocatorConfig().segment_bytes(refused.asked) <= refused.free:
        reason = "limited"
    elif refused.asked <= unused + refused.free:
        reason = "fragmented"
    return Refusal(
        asked_bytes=refused.asked,
        device_free_bytes=refused.free,
        allocated_bytes=allocated,
        reserved_bytes=refused.reserved,
        largest_free_bytes=refused.largest_piece,
        reason=reason,
    )


def _differences(recorded: int, replayed: int, name: str) -> list[str]:
    """Return a note if a replay does not reserve what was recorded."""
    if abs(replayed - recorded) <= NOTED_SHARE * recorded:
        return []
    return [
        f"{name}: a replay of its blocks reserves {format_bytes(replayed)} at the peak, and the GPU reserved "
        f"{format_bytes(recorded)}"
    ]


# Two or three recordings


class _Prediction(NamedTuple):
    """Knowledge of a program that was recorded at several sizes."""

    step: Footprint
    apart_bytes: int
    """Live at the peak of the largest recording, and not in all of them."""
    recording: Recording
    """The largest."""
    size: int
    """Its size."""
    options: Options
    gpus: Gpus

    def spending(self, gpu: HardwareProfile) -> Spending:
        """Return the budget of a GPU, to be spent in a model with the streams of the recording."""
        pools, grows = self.recording.pools, self.recording.is_expandable

        def allocator(limit: int | None, expandable: bool) -> OnPools:
            return OnPools(limit, pools, expandable=expandable or grows)

        return Spending(self.gpus.budget(gpu)[0], allocator, self.gpus.cap, can_expand=not grows)

    def estimate(self, gpu: HardwareProfile) -> Estimate:
        """Predict what fits on one GPU."""
        (budget, source), spending = self.gpus.budget(gpu), self.spending(gpu)
        asked, target = self.options.micro_batch, self.options.target_batch
        found = spending.predict(self.step, asked)
        trace = self.step.program.at(max(1, found.micro_batch))
        live = _live_at(trace, replay(trace, CountingAllocator()).peak_at)
        if self.apart_bytes:  # it may have grown with the size
            margin = self.apart_bytes * max(1, found.micro_batch / self.size - 1) / budget
            wider = self.step._replace(margin=min(1.0, self.step.margin + margin))
            found = spending.predict(wider, asked)
        plan = None
        if found.fits and target is not None:
            plan = equal_plan(
                target, found.micro_batch, world_size=self.gpus.world, multiple=self.step.multiple
            )
        return Estimate(
            profile=gpu.name,
            budget_bytes=budget,
            budget_source=source,
            precision=None,
            micro_batch=found.micro_batch,
            micro_batch_low=found.low,
            micro_batch_high=found.high,
            fits=found.fits,
            peak_allocated_bytes=found.outcome.peak_allocated_bytes,
            peak_reserved_bytes=found.outcome.peak_reserved_bytes,
            plan=plan,
            memory=_by_line(live, self.recording.stacks),
            modules={},
            phase="",
            world_size=self.gpus.world,
            seconds=0.0,
        )


def _predicted(
    sized: Sequence[tuple[int, Recording]], options: Options, gpus: Gpus, notes: Sequence[str]
) -> Estimates:
    """Predict what fits on each GPU from recordings, the smallest first.

    Raises:
        InputError: the recordings part too far.
        DoesNotFitError: nothing fits.
    """
    start = time.perf_counter()
    (program, unpaired), (largest, last) = _aligned(sized), sized[-1]
    trace, recorded = program.at(largest), last.peak_reserved_bytes
    outcome = replay(trace, _model(last))
    reserved = outcome.peak_reserved_bytes or 0
    margin = max(MARGIN, abs(reserved - recorded) / recorded)
    step = Footprint(program, margin, multiple=options.micro_batch_multiple)
    live = _live_at(trace, outcome.peak_at)
    apart = sum(live[block] for block in unpaired & live.keys())
    share = apart / sum(live.values())
    if share > MOST_GUESSED:
        raise InputError(
            f"the recordings part too far: {format_bytes(apart)} ({share:.0%}) of what is live at the peak "
            f"of {largest} are not in all of them, or grow by no rule. Record the same steps of the same "
            "program, at sizes that are closer"
        )
    said = [*notes, *_differences(recorded, reserved, f"at {largest}")]
    if unpaired:
        lives = (
            f"are {share:.0%} of the peak. Recordings at larger sizes say more"
            if apart
            else "are not live at the peak"
        )
        said.append(
            f"{plural(len(unpaired), 'block')} of {count(len(last.pools))} are not in all recordings, or "
            f"grow by no rule: taken as at {largest}, where they {lives}"
        )
    known = _Prediction(step, apart, last, largest, options, gpus)
    found = run_in_copies([partial(known.estimate, gpu) for gpu in gpus.asked])
    found = with_remedies(found, gpus, lambda gpu: helpful(step, [], known.spending(gpu)))
    for estimate in found:
        note = estimate.plan and even_split_note(estimate.plan, estimate.micro_batch)
        said += [f"{estimate.profile}: {note}"] if note else []
    said += gpus.notes(found)
    if not gpus.are_named:
        found.sort(key=need)
    seconds = time.perf_counter() - start
    found = [msgspec.structs.replace(estimate, seconds=seconds) for estimate in found]
    return Estimates(estimates=found, notes=[*dict.fromkeys(said)])


def _aligned(sized: Sequence[tuple[int, Recording]]) -> Aligned:
    """Fit a program to recordings, whose blocks are paired by their stack and pool.

    Raises:
        InputError: they part too far, with the place.
    """
    points = [
        Sized(size, recording.trace, list(zip(recording.stacks, recording.pools, strict=True)))
        for size, recording in sized
    ]
    try:
        return align(points)
    except Apart as apart:
        ends = dict(sized)
        where = [
            f"block {block:,} of {len(ends[size].pools):,} at {size}{_about(ends[size], block)}"
            for size, block in zip(apart.sizes, apart.reached, strict=True)
        ]
        raise InputError(
            f"the recordings at {apart.sizes[0]} and {apart.sizes[1]} part too far: after {where[0]} and "
            f"{where[1]} more than {apart.most} blocks are in one of them alone. Record the same steps of "
            "the same program, at sizes that are closer"
        ) from None


def _about(recording: Recording, block: int) -> str:
    """Return the size and the line of a block."""
    sizes = block_sizes(recording.trace)
    if block >= len(sizes):
        return " (its end)"
    line = line_of(recording.stacks[block])
    return f" ({format_bytes(sizes[block])}{line and ' in '}{line})"


def line_of(stack: Stack) -> str:
    """Return the user's own line that allocated a block, else that of a library; empty without frames."""
    python = [frame for frame in stack if frame.file.endswith(".py") or frame.file.startswith("<")]
    own = [frame for frame in python if not any(part in frame.file for part in LIBRARIES)]
    for frame in [*own, *python]:
        return f"{frame.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line} {frame.function}"
    return ""
