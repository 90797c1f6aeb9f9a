"""The model and predictions against what others measured and published on real GPUs.

    python -m benchmarks.published recordings FILE…
    python -m benchmarks.published limits --checkouts DIR [--out FILE] [--only TEXT] [--seconds N]
    python -m benchmarks.published peaks --checkouts DIR [--out FILE] [--only TEXT] [--seconds N]

``recordings`` takes memory snapshots of torch, or their reduced form (tests/recordings). ``limits`` and
``peaks`` predict the rows of ``benchmarks/published/data``, one at a time, and leave out those that the file
has. The sources' own models are imported from DIR: ``timm``, a checkout or its package, beside torchvision in
``site``; and ``litgpt-COMMIT``, a checkout for each commit in the data.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks.published import predict, recordings
from benchmarks.report import RESULTS, markdown

DATA = Path(__file__).parent / "data"
Row = dict[str, str]
SOURCES = {"limits": ("timm-rtx3090",), "peaks": ("litgpt", "bert-large-v100")}
PREDICTED = {"limits": predict.limits_of, "peaks": predict.peak_of}
SCALES = (0.9, 0.95, 1.0, 1.05, 1.1)
"""Factors on all predictions, which show how sharp the brackets are."""


def main() -> int:
    """Run a command, and print its table; 1 if the model differs from a recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("recordings").add_argument("files", nargs="+", type=Path, metavar="FILE")
    for name in SOURCES:
        command = commands.add_parser(name)
        command.add_argument("--checkouts", type=Path, required=True, metavar="DIR")
        command.add_argument("--out", type=Path, default=RESULTS / f"published_{name}.csv")
        command.add_argument("--only", default="", help="rows that have this text")
        command.add_argument("--seconds", type=float, default=3600, help="begin no row after these")
    options = parser.parse_args()
    if options.command == "recordings":
        head = ("recording", "blocks", "same address", "segments", "peak, bytes", "peak of the model")
        rows = [*recordings.table(options.files)]
        print(markdown(head, rows))
        return int(rows[-1][1] != rows[-1][2])
    end = time.monotonic() + options.seconds
    found = [row for source in SOURCES[options.command] for row in predicted(source, options, end)]
    print(limits_table(found) if options.command == "limits" else peaks_table(found))
    return 0


def predicted(source: str, options: argparse.Namespace, end: float) -> Iterator[Row]:
    """Yield the rows of a source with their predictions; each new one is added to the file."""
    out = options.out.with_stem(f"{options.out.stem}_{source}")
    rows, known = read(DATA / f"{source}.csv"), read(out) if out.exists() else []
    for row in rows:
        key = [*row.values()]
        earlier = next((one for one in known if [*one.values()][: len(key)] == key), None)
        if earlier is not None:
            yield earlier
            continue
        if time.monotonic() > end or options.only not in ",".join(key):
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            function = PREDICTED[options.command]
            try:
                found = pool.submit(function, options.checkouts.resolve(), row).result()
            except Exception as error:  # one model that cannot be predicted leaves the others
                print(f"{','.join(key)}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                continue
        new = {**row, **{name: str(value) for name, value in found.items()}}
        with out.open("a", newline="") as file:
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
    for name, column in (("without retries, as autobatch", "predicted"), ("with retries", "with_retries")):
        ratios = [off(row, int(row[column])) for row in rows]
        wrong = [ratio for ratio in ratios if ratio != 1] or [1.0]
        inside = [
            sum(off(row, int(int(row[column]) * scale)) == 1 for row in rows if row["failed"])
            for scale in SCALES
        ]
        below, above = (sum(ratio < 1 for ratio in ratios), sum(ratio > 1 for ratio in ratios))
        worst = f"{min(wrong):.2f}, {max(wrong):.2f}"
        lines.append(
            [name, len(rows), len(rows) - below - above, below, above, f"{median(wrong):.2f}", worst, *inside]
        )
    met = sum(
        int(row["low"]) < int(row["failed"] or sys.maxsize) and int(row["high"]) >= int(row["ran"])
        for row in rows
    )
    seconds = [float(row["seconds"]) for row in rows]
    head = (
        "fits",
        "rows",
        "inside",
        "too low",
        "too high",
        "median miss",
        "worst",
        *(f"× {scale}" for scale in SCALES),
    )
    return (
        markdown(head, lines)
        + f"\nThe interval meets {met} of {len(rows)} brackets. "
        + f"Seconds: {median(seconds):.1f} in the median, {max(seconds):.1f} at most.\n"
    )


def peaks_table(rows: Sequence[Row]) -> str:
    """Return predicted ÷ published peaks by source, of the rows that judge."""
    lines = []
    for source in dict.fromkeys(row["source"] for row in rows):
        own = [row for row in rows if row["source"] == source and row.get("judges", "yes") == "yes"]
        failed = [row for row in own if row.get("published_gb") == "OOM"]
        ratios = [int(row["predicted_bytes"]) / measured(row) for row in own if row not in failed]
        refused = f"{sum(row['fits'] == 'False' for row in failed)} of {len(failed)}"
        lines.append(
            [source, len(ratios), f"{median(ratios):.4f}", f"{min(ratios):.4f} to {max(ratios):.4f}", refused]
        )
    return markdown(("source", "rows", "median", "least to most", "out of memory refused"), lines)


def measured(row: Row) -> float:
    """Return the published bytes."""
    if "published_gb" in row:
        return float(row["published_gb"]) * 1e9
    return float(int(row["nvml_used_mib"]) - int(row["context_mib"])) * 2**20


if __name__ == "__main__":
    sys.exit(main())
