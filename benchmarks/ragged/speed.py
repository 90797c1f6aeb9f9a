"""Time, padding, peak and gradient of a split by size, beside other splits of the same batches.

    python -m benchmarks.ragged.speed FOLDER [--rounds 5] [--device cpu] [--lengths sft] [--splits count auto]

The other splits are by count (random order, a fixed count), sorted with a fixed count, and filled to a token
limit from the longest (as frameworks for reinforcement learning do). On the CPU, seconds are those of the
processor, which other processes disturb least. What was measured is kept in FOLDER, so that a call continues
an earlier one. The results are saved once nothing is missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autobatch.core.options import Options
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan, micro_batches
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.rehearsal import batches_of, open_train_state
from autobatch.rehearsal.setup import Setup, open_setup
from autobatch.search.find_limit import check_size
from autobatch.search.plan_split import choose_split
from autobatch.step.restore import temporary_weights
from autobatch.step.train_step import accumulate, train_step
from autobatch.workload.data import load_micro_batch
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.split import SizeSplit
from benchmarks.gpu.journal import DONE, Journal, last_call
from benchmarks.ragged.workloads import VOCABULARY, Gpt, workload
from benchmarks.report import arguments, in_turn, markdown, save
from tests.support.probes import Listener

TARGET = 128
LIMIT = 8
"""Micro-batch of the longest samples."""
LONGEST = 512
SAMPLES = 4096
Groups = list[list[int]]
ALL = ["log-normal", "sft", "uniform", "two-peaked", "equal"]
SPLITS = ["count", "sorted, fixed count", "token limit", "auto"]


def in_counts(ids: list[int], limit: int) -> Groups:
    """Cut a list into equal counts."""
    groups, first = [], 0
    for size in micro_batches(len(ids), limit):
        groups.append(ids[first : first + size])
        first += size
    return groups


def longest_first(ids: list[int], sizes: np.ndarray) -> list[int]:
    """Sort samples by size."""
    return sorted(ids, key=lambda index: -sizes[index])


def to_token_limit(ids: list[int], sizes: np.ndarray) -> Groups:
    """Fill micro-batches to the padded size of the longest one, from the longest sample on."""
    limit, groups = LIMIT * sizes.max(), []
    for index in longest_first(ids, sizes):
        if not groups or (len(groups[-1]) + 1) * sizes[groups[-1][0]] > limit:
            groups.append([])
        groups[-1].append(index)
    return groups


def setup_of(lengths: str, device: str) -> Setup:
    """Open a small language model whose budget is that of ``LIMIT`` samples of the longest."""
    made = replace(
        workload("transformer", lengths, count=SAMPLES, longest=LONGEST),
        model=lambda: Gpt(64, 2, vocabulary=VOCABULARY),
    )
    wide = open_setup(made, Options().with_values(device=device, memory_budget="8GiB"))
    found = attempt(wide, LIMIT).attempt
    budget = found.peak_reserved_bytes or found.peak_allocated_bytes
    return open_setup(made, Options().with_values(device=device, memory_budget=budget))


def splits_of(setup: Setup, rounds: int) -> tuple[dict[str, list[Groups]], dict[str, Any]]:
    """Return the micro-batches of each split over an epoch, and what the choice of the split says."""
    count = max(rounds + 1, SAMPLES // TARGET)
    sizes = setup.worst_case.sizes()
    assert sizes is not None
    plan = make_plan(target_batch=TARGET, micro_batch_limit=LIMIT, learning_rate=1e-3)
    process, listener = ThisProcess(setup), Listener()
    limit = check_size(process, LIMIT, progress=listener)
    cut = choose_split(process, plan, limit, Options(), ranks=Ranks(), progress=listener).size_cut
    sampler = GlobalBatchSampler(samples=SAMPLES, target_batch=TARGET, seed=0, steps=count)
    batches = [GlobalBatch(batch.index, 0, batch.ids) for batch in sampler.batches()]
    found = {
        "count": [in_counts(batch.ids, LIMIT) for batch in batches],
        "sorted, fixed count": [in_counts(longest_first(batch.ids, sizes), LIMIT) for batch in batches],
        "token limit": [to_token_limit(batch.ids, sizes) for batch in batches],
    }
    if cut is None:
        found["auto"] = found["count"]
    else:
        split = SizeSplit(sizes=sizes, cut=cut)
        found["auto"] = [[part.ids for part in split.parts(batch, split.largest)] for batch in batches]
    return found, {"note": listener.notes[-1:], "cut": None if cut is None else cut.micro_batch}


def measure(lengths: str, device: str, rounds: int, names: list[str]) -> dict[str, Any]:
    """Measure splits of a distribution, ``count`` and ``auto`` among them."""
    setup = setup_of(lengths, device)
    sizes = setup.worst_case.sizes()
    assert sizes is not None
    splits, about = splits_of(setup, rounds)
    splits = {name: found for name, found in splits.items() if name in names}
    seconds = time_splits(setup, splits, rounds)
    figures: dict[str, Any] = {"lengths": lengths, **about, "splits": {}}
    for name, epoch in splits.items():
        batches = epoch[: rounds + 1]
        padded = sum(len(group) * sizes[group].max() for groups in batches for group in groups)
        real = sum(sizes[group].sum() for groups in batches for group in groups)
        figures["splits"][name] = {
            "seconds": seconds[name],
            "ratio": sum(seconds[name]) / sum(seconds["count"]),
            "padded_by_real": float(padded / real),
            "micro_batches": statistics.fmean(len(groups) for groups in batches),
            "peak_bytes": peak_of(setup, costliest(epoch, sizes)),
        }
    figures["gradient_error"] = gradient_error(setup, splits["auto"][1], splits["count"][1])
    print(figures, flush=True)
    return figures


def time_splits(setup: Setup, splits: dict[str, list[Groups]], rounds: int) -> dict[str, list[float]]:
    """Time one step of each split per round; the first round warms up."""
    with setup.device.training() as meter, temporary_weights(setup.model, setup.device.torch_device):
        state = open_train_state(setup, meter)

        def stepping(epoch: list[Groups]) -> Callable[[], None]:
            batches = iter(epoch)

            def step() -> None:
                train_step(state, batches_of(setup, state, meter, fetched(setup, next(batches))), TARGET)
                setup.device.synchronize()

            return step

        found = in_turn({name: stepping(epoch) for name, epoch in splits.items()}, rounds + 1)
    clock = "cpu" if setup.device.kind == "cpu" else "wall"
    return {name: seconds[clock][1:] for name, seconds in found.items()}


def fetched(setup: Setup, groups: Groups) -> Iterator[tuple[Any, int]]:
    """Yield the micro-batches of a batch, each with its number of samples."""
    for ids in groups:
        yield load_micro_batch(setup.workload, ids), len(ids)


def costliest(batches: list[Groups], sizes: np.ndarray) -> Groups:
    """Return the batch of an epoch with the largest padded micro-batch."""
    return max(batches, key=lambda groups: max(len(group) * sizes[group].max() for group in groups))


def peak_of(setup: Setup, groups: Groups) -> int | None:
    """Return the peak of two steps over one batch."""
    wide = open_setup(setup.workload, Options().with_values(device=setup.device.kind, memory_budget="8GiB"))
    with (
        wide.device.enforced() as meter,
        temporary_weights(wide.model, wide.device.torch_device),
    ):
        state = open_train_state(wide, meter)
        for _ in range(2):
            batches = batches_of(wide, state, meter, fetched(wide, groups))
            train_step(state, batches, TARGET, mark=meter.mark)
        return meter.stats().peak_allocated_bytes


def gradient_error(setup: Setup, groups: Groups, others: Groups) -> float:
    """Return the relative distance of the gradients of two splits of one batch, in float64."""
    found = []
    setup.model.double()
    for split in (groups, others):
        with setup.device.training() as meter, temporary_weights(setup.model, setup.device.torch_device):
            state = open_train_state(setup, meter)
            batches = batches_of(setup, state, meter, fetched(setup, split))
            totals = accumulate(state, batches, TARGET, lambda _: None)
            own = [gradient for one in state.gradients.by_optimizer() for gradient in one]
            scale = totals.divisor / float(totals.count or TARGET)
            found.append(torch.cat([gradient.flatten() for gradient in own]).cpu() * scale)
            state.gradients.clear()
    setup.model.float()
    return float((found[0] - found[1]).norm() / found[1].norm())


def text(rows: list[dict[str, Any]]) -> str:
    """Summarize the figures in a table."""
    head = ("lengths", "split", "time ÷ count", "padded ÷ real", "micro-batches", "peak ÷ count")
    lines = []
    for row in rows:
        base = row["splits"]["count"]["peak_bytes"]
        for name, one in row["splits"].items():
            figures = (one["ratio"], one["padded_by_real"], one["micro_batches"], one["peak_bytes"] / base)
            error = f"{row['gradient_error']:.0e}" if name == "auto" else ""
            lines.append([row["lengths"], name, *(f"{figure:.2f}" for figure in figures), error])
    return markdown([*head, "gradient error"], lines)


def main() -> None:
    """Measure every distribution that is not in the journal, and save the results once all are."""
    options = arguments(__doc__, folder=Path, rounds=5, device="cpu", lengths=ALL, splits=SPLITS)
    names = ["count", "auto", *options.splits]
    options.folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.folder, last_call(options.folder) + 1)
    for lengths in options.lengths:
        if lengths not in journal.done():
            journal.write(lengths, DONE, row=measure(lengths, options.device, options.rounds, names))
    found = {row["unit"]: row["row"] for row in journal.rows() if row["status"] == DONE}
    rows = [found[lengths] for lengths in ALL if lengths in found]
    print(text(rows))
    if len(rows) == len(ALL):
        save("ragged-speed", text(rows), rounds=options.rounds)


if __name__ == "__main__":
    main()
