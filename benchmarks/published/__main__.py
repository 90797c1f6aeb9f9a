"""The model and predictions against what others measured and published on real GPUs.

    python -m benchmarks.published recordings FILE…
    python -m benchmarks.published limits --checkouts DIR [--out DIR] [--only TEXT]
    python -m benchmarks.published peaks --checkouts DIR [--out DIR] [--only TEXT]

``recordings`` takes memory snapshots of torch, or their reduced form (tests/recordings). ``limits`` and
``peaks`` predict the rows of ``benchmarks/published/data``, one at a time, and leave out those that the
files of results have. The sources' own models are imported from the checkouts: ``timm``, a checkout or its
package (with torchvision installed); ``litgpt-COMMIT`` for each commit in the data; ``torchtitan`` at the
commit in the data. BERT is that of the installed transformers.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks.published import predict, recordings
from benchmarks.report import RESULTS, markdown

DATA = Path(__file__).parent / "data"
Row = dict[str, str]
SOURCES = {"limits": ("timm-rtx3090", "timm-rtx3090-further"), "peaks": tuple(predict.STEPS)}
DEFINITIONS = {"as in autobatch": "predicted", "as in that benchmark, with retries": "with_retries"}
"""Columns of predicted limits, by what they call a fit."""
SCALES = (0.9, 0.95, 1.0, 1.05, 1.1)
"""Factors on all predictions, which show how sharp the brackets are."""


def main() -> int:
    """Run a command, and print its tables; 1 if the model differs from a recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("recordings").add_argument("files", nargs="+", type=Path, metavar="FILE")
    for name in SOURCES:
        command = commands.add_parser(name)
        command.add_argument("--checkouts", type=Path, required=True, metavar="DIR")
        command.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
        command.add_argument("--only", default="", metavar="TEXT", help="rows that have this text")
    options = parser.parse_args()
    if options.command == "recordings":
        outcomes = {path: recordings.replays_of(recordings.read_any(path)) for path in options.files}
        print(recordings_table(outcomes))
        return int(not all(outcome.agrees for each in outcomes.values() for outcome in each))
    is_limit = options.command == "limits"
    table = limits_table if is_limit else peaks_table
    for source in SOURCES[options.command]:
        asked = [row for row in read(DATA / f"{source}.csv") if options.only in ",".join(row.values())]
        results = options.out / f"published_{options.command}_{source}.csv"
        of_row = predict.limits_of if is_limit else partial(predict.peak_of, source)
        if rows := [*predicted(asked, results, partial(of_row, options.checkouts.resolve()))]:
            print(f"{source}:\n\n{table(rows)}")
    return 0


def recordings_table(outcomes: Mapping[Path, Sequence[recordings.Outcome]]) -> str:
    """Return a line for each replay, and their sum; of a file that has none, that it is so."""
    lines: list[tuple[object, ...]] = []
    for path, replays in outcomes.items():
        lines += [(path.name, *outcome) for outcome in replays] or [(path.name, "not replayed", *"----")]
    every = [outcome for replays in outcomes.values() for outcome in replays]
    sums = [sum(column) for column in zip(*every, strict=True)][:3]
    equal = sum(outcome.model_peak_bytes == outcome.peak_bytes for outcome in every)
    lines.append((f"{len(every)} recordings", *sums, f"{equal} peaks equal", ""))
    head = ("recording", "blocks", "same address", "segments", "peak, bytes", "peak of the model")
    return markdown(head, lines)


def predicted(
    asked: Iterable[Row], results: Path, of_row: Callable[[Row], Mapping[str, object]]
) -> Iterator[Row]:
    """Yield rows with their predictions; a new one is added to the results, and none is predicted twice."""
    known = read(results) if results.exists() else []
    for row in asked:
        if earlier := [other for other in known if row.items() <= other.items()]:
            yield earlier[0]
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                found = pool.submit(of_row, row).result()
            except Exception as error:  # one model that cannot be predicted leaves the others
                print(f"{','.join(row.values())}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                continue
        new = row | {name: str(value) for name, value in found.items()}
        with results.open("a", newline="") as file:
            writer = csv.DictWriter(file, new)
            if not file.tell():
                writer.writeheader()
            writer.writerow(new)
        print(*new.values(), sep=",", file=sys.stderr, flush=True)
        yield new


def read(path: Path) -> list[Row]:
    """Read the rows of a CSV file."""
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def off(row: Row, size: float) -> float:
    """Return a size divided by the nearest end of its bracket, 1 inside of it."""
    ran, failed = int(row["ran"]), int(row["failed"] or sys.maxsize)
    return size / ran if size < ran else 1.0 if size < failed else size / failed


def limits_table(rows: Sequence[Row]) -> str:
    """Return how many predicted limits lie in their brackets, by both definitions of fitting."""
    lines = []
    for name, column in DEFINITIONS.items():
        misses = [ratio for row in rows if (ratio := off(row, int(row[column]))) != 1]
        below = sum(ratio < 1 for ratio in misses)
        spread = [f"{ratio(misses or [1.0]):.3f}" for ratio in (median, min, max)]
        scaled = (
            sum(off(row, int(int(row[column]) * scale)) == 1 for row in rows if row["failed"])
            for scale in SCALES
        )
        counts = (len(rows), len(rows) - len(misses), below, len(misses) - below)
        lines.append((name, *counts, *spread, *scaled))
    head = ("fits", "rows", "inside", "too low", "too high", "median miss", "lowest", "highest")
    ends = [(off(row, int(row["low"])), off(row, int(row["high"]))) for row in rows]
    met = sum(low <= 1 <= high for low, high in ends)
    seconds = [float(row["seconds"]) for row in rows]
    return (
        f"{markdown((*head, *(f'× {scale}' for scale in SCALES)), lines)}\n"
        f"The interval meets {met} of {len(rows)} brackets. "
        f"Seconds: {median(seconds):.1f} in the median, {max(seconds):.1f} at most.\n"
    )


def peaks_table(rows: Sequence[Row]) -> str:
    """Return predicted ÷ published peaks by source, of the rows that judge."""
    lines = []
    for source in dict.fromkeys(row["source"] for row in rows):
        own = [row for row in rows if row["source"] == source and row["judges"] == "yes"]
        failed = [row for row in own if row["published_gb"] == "OOM"]
        ratios = [
            int(row["predicted_bytes"]) / (float(row["published_gb"]) * 1e9)
            for row in own
            if row not in failed
        ]
        spread = [f"{ratio(ratios):.4f}" for ratio in (median, min, max)]
        refused = f"{sum(row['fits'] == 'False' for row in failed)} of {len(failed)}"
        lines.append((source, len(ratios), *spread, refused))
    return markdown(("source", "rows", "median", "least", "most", "out of memory refused"), lines)


if __name__ == "__main__":
    sys.exit(main())
