"""A program whose snapshots were recorded at several sizes: aligned block by block, fitted over the size.

    Recording at 8 ─┐
                    ├─ blocks in pairs ─► one order of events, that of the largest ─► Program
    Recording at 16 ┘

Between sizes few blocks come and go: the scratch of a long sum, a library's workspace in the first run. These
are taken as in the largest recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from msgspec.structs import replace

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records import Estimate
from autobatch.core.units import format_bytes
from autobatch.device.allocator import Allocator, AllocatorConfig, CachingAllocator
from autobatch.device.profiles import HardwareProfile
from autobatch.device.snapshot_file import Recording, Stack
from autobatch.device.trace import FREE, Trace, replay
from autobatch.estimates.gpus import Budget, Gpus
from autobatch.estimates.traced_step import MARGIN, Footprint
from autobatch.footprint.program import Polynomial, Program, block_sizes, polynomial_through
from autobatch.planning import program_plan
from autobatch.report.words import count, plural

MOST_LINES = 12
"""Lines of the program in an explanation, those with the most bytes."""
MOST_GUESSED = 1 / 3
"""Share of a peak that may be taken as it is in the largest recording."""
NOTED_SHARE = 0.01
"""Share of a peak by which a replay may differ from its recording without a note."""
LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "/torch/", "<frozen", "<string>", "?")
"""Parts of the names of files that are not the user's own."""
MOST_APART, LEAST_APART = 0.25, 16
"""Share and number of blocks that one of two recordings may have alone. A sum of gradients takes two more
from some size on, which is one block in ten for a model of linear layers."""
MOST_EDITS = 1000
"""Bound on them, as the search for pairs takes its square."""
LIFE_SLACK, LIFE_SHARE = 8, 3
"""Number of allocations, and one part in this many, by which the lives of a pair may differ."""
CLOSER = "Record the same steps of the same program, at sizes that are closer"


class RecordedProgram:
    """Predictions for a program that was recorded at several sizes, the smallest first.

    Raises:
        InputError: the recordings part too far.
    """

    def __init__(self, recordings: dict[int, Recording], options: Options, gpus: Gpus) -> None:
        self._options, self._gpus = options, gpus
        self._size, self._largest = max(recordings.items())
        program, unpaired = _align(recordings)
        trace = program.at(self._size)
        outcome = replay(trace, CachingAllocator(None, self._config))
        live = trace.live_after(outcome.peak_at)
        self._apart_bytes = sum(live[block] for block in unpaired & live.keys())
        """Bytes at the peak of the largest recording that are taken as they are there."""
        share = self._apart_bytes / sum(live.values())
        if share > MOST_GUESSED:
            raise InputError(
                f"the recordings part too far: {format_bytes(self._apart_bytes)} ({share:.0%}) of what is "
                f"live at the peak of {self._size} are not in all of them, or grow by no rule. {CLOSER}"
            )
        recorded, replayed = self._largest.peak_reserved_bytes, outcome.peak_reserved_bytes or 0
        margin = max(MARGIN, abs(replayed - recorded) / recorded)
        self.step = Footprint(program, margin, multiple=options.micro_batch_multiple)
        self.notes = [*differences(recorded, replayed, f"at {self._size}")]
        """What limits a prediction, one line each."""
        if unpaired:
            lives = "are not live at the peak"
            if self._apart_bytes:
                lives = f"are {share:.0%} of the peak. Recordings at larger sizes say more"
            self.notes.append(
                f"{plural(len(unpaired), 'block')} of {count(len(self._largest.stacks))} are not in all "
                f"recordings, or grow by no rule: taken as at {self._size}, where they {lives}"
            )

    @property
    def _config(self) -> AllocatorConfig:
        return AllocatorConfig(expandable_segments=self._largest.is_expandable)

    def budget(self, gpu: HardwareProfile) -> Budget:
        """Return the budget of a GPU, whose allocator has segments as in the recording."""
        return self._gpus.budget(gpu)._replace(config=self._config)

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
        return replace(found, plan=plan, memory=by_line(live, self._largest.stacks), world_size=world)


def differences(recorded: int, replayed: int, name: str) -> Iterator[str]:
    """Yield a line if a replay does not reserve what was recorded."""
    if abs(replayed - recorded) > NOTED_SHARE * recorded:
        yield (
            f"{name}: a replay of its blocks reserves {format_bytes(replayed)} at the peak, and the GPU "
            f"reserved {format_bytes(recorded)}"
        )


def by_line(live: dict[int, int], stacks: Sequence[Stack]) -> dict[str, int]:
    """Return the bytes of live blocks by the line that took them."""
    taken: Counter[str] = Counter()
    for block, size in live.items():
        taken[_line_of(stacks[block])] += size
    shown = dict(taken.most_common(MOST_LINES))
    rest = taken.total() - sum(shown.values())
    return shown | ({"all others": rest} if rest else {})


def _line_of(stack: Stack) -> str:
    """Return the user's own line that allocated a block, else that of a library."""
    python = [frame for frame in stack if frame.file.endswith(".py") or frame.file.startswith("<")]
    own = [frame for frame in python if not any(part in frame.file for part in LIBRARIES)]
    for frame in [*own, *python]:
        return f"{frame.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line} {frame.function}"
    return "without a line"


def _align(recordings: dict[int, Recording]) -> tuple[Program, frozenset[int]]:
    """Fit a program to recordings, the smallest first.

    Returns:
        The program, and the blocks that are taken from the largest recording: not all have them, or they
        follow no rule.

    Raises:
        InputError: the recordings part too far.
    """
    *sizes, largest = recordings
    pairs = [_pairs(recordings, size, largest) for size in sizes]
    columns = [block_sizes(recording.trace) for recording in recordings.values()]
    rule_of = cache(partial(_rule, [*recordings]))
    rules: list[Polynomial] = []
    unpaired = set()
    for block, size in enumerate(columns[-1]):
        of_pair = [column[pair[block]] for column, pair in zip(columns, pairs, strict=False) if block in pair]
        rule = rule_of((*of_pair, size)) if len(of_pair) == len(pairs) else None
        if rule is None:
            unpaired.add(block)
        rules.append(rule or Polynomial(size))
    return Program(recordings[largest].trace, tuple(rules)), frozenset(unpaired)


def _rule(points: Sequence[int], sizes: Sequence[int]) -> Polynomial | None:
    """Return the polynomial through sizes; None if there is none, or if it is negative at a size of 1."""
    rule = polynomial_through(points, sizes)
    return rule if rule is not None and sum(rule[:3]) >= 0 else None


def _pairs(recordings: dict[int, Recording], n: int, m: int) -> dict[int, int]:
    """Return the block at size n for each block at the larger size m that both recordings have.

    Paired in order are blocks of one stack and stream that stay, or grow by no more than the square of the
    size.

    Raises:
        InputError: the recordings part too far, with the place.
    """
    small, large = recordings[n], recordings[m]
    sizes, lives = block_sizes(small.trace), _lives(small.trace)
    other_sizes, other_lives = block_sizes(large.trace), _lives(large.trace)

    def may_be_pair(x: int, y: int) -> bool:
        life, other_life = lives[x], other_lives[y]
        return (
            sizes[x] * n * n <= other_sizes[y] * n * n <= sizes[x] * m * m
            and abs(life - other_life) <= LIFE_SLACK + max(life, other_life) // LIFE_SHARE
            and small.stacks[x] == large.stacks[y]
            and small.trace.streams[x] == large.trace.streams[y]
        )

    most = min(MOST_EDITS, max(LEAST_APART, int(MOST_APART * len(other_sizes))))
    pairs, reached = _shortest_edit(may_be_pair, len(sizes), len(other_sizes), most)
    if pairs is not None:
        return pairs
    where = []
    for size, block in zip((n, m), reached, strict=True):
        stacks = recordings[size].stacks
        line = _line_of(stacks[block]) if block < len(stacks) else "its end"
        where.append(f"block {block:,} of {len(stacks):,} at {size} ({line})")
    raise InputError(
        f"the recordings at {n} and {m} part too far: after {where[0]} and {where[1]} more than {most} "
        f"blocks are in one of them alone. {CLOSER}"
    )


def _shortest_edit(
    is_pair: Callable[[int, int], bool], n: int, m: int, most: int
) -> tuple[dict[int, int] | None, tuple[int, int]]:
    """Pair numbers below n and m, in order, so that at most so many are left alone (Myers 1986).

    Returns:
        The first number by the second, None if more are left alone; and the numbers that were reached.
    """
    reached: dict[int, tuple[int, Any]] = {1: (0, None)}
    """The first number that was reached for each difference of both, and the runs of pairs up to there."""
    for edits in range(most + 1):
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reached[k - 1][0] < reached[k + 1][0])
            x, runs = reached[k + 1 if down else k - 1]
            start = x = x if down else x + 1
            while x < n and x - k < m and is_pair(x, x - k):
                x += 1
            reached[k] = x, (start, x, k, runs) if x > start else runs
            if x >= n and x - k >= m:
                return dict(_unrolled(reached[k][1])), (n, m)
    x, k = max((min(x, n), k) for k, (x, _) in reached.items() if x - k <= m)
    return None, (x, x - k)


def _unrolled(runs: Any) -> Iterator[tuple[int, int]]:
    """Yield the pairs of runs, the last run first."""
    while runs is not None:
        start, end, k, runs = runs
        yield from ((x - k, x) for x in range(start, end))


def _lives(trace: Trace) -> list[int]:
    """Return how many allocations follow each block until it is freed, or until the end."""
    made, ends = 0, dict[int, int]()
    for block, size in trace.events:
        if size == FREE:
            ends[block] = made
        else:
            made += 1
    return [ends.get(block, made) - block - 1 for block in range(made)]
