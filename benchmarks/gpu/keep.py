"""What stays of a measurement: fixtures that tests on the CPU replay, figures of the profile, and the table.

    python -m benchmarks.gpu.keep DIR [--fixtures tests/fixtures/gpu] [--profile profiles/h200.toml]

``DIR`` has the results of ``python -m benchmarks.gpu --out DIR``.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from autobatch.device.profiles import Figure, HardwareProfile, format_profile, read_profile
from benchmarks.gpu.claims import Found, table
from benchmarks.gpu.journal import DONE, FILE, Journal, latest
from benchmarks.gpu.recordings import GOLDEN_FILE, TRACES_FILE
from benchmarks.report import RESULTS

ROOT = Path(__file__).parents[2]
LARGEST_FIXTURE_BYTES = 4 << 20
"""A fixture travels with the repository, so it stays small."""
COMMAND = "python -m benchmarks.gpu"


def main() -> None:
    """Write what stays of a measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.keep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--fixtures", type=Path, default=ROOT / "tests/fixtures/gpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--profile", type=Path, help="profile that gets the measured figures")
    options = parser.parse_args()
    rows = Journal(options.folder, 0).rows()
    found = {name: row["found"] for name, row in latest(rows).items() if row["status"] == DONE}
    if "facts/versions" not in found:
        parser.error(f"{options.folder / FILE} has no row of facts/versions, which names the GPU")
    for file in keep_fixtures(options.folder, options.fixtures, slug_of(found)):
        print(file)
    print(keep_results(rows, found, options.results))
    if options.profile is not None:
        options.profile.write_text(format_profile(measured(read_profile(options.profile), found)))
        print(options.profile)


def slug_of(found: Found) -> str:
    """Return a name for files: the GPU and torch's version without its build."""
    about = found["facts/versions"]
    text = f"{about['gpu']} torch {str(about['torch']).partition('+')[0]}"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def keep_fixtures(folder: Path, fixtures: Path, slug: str) -> list[Path]:
    """Copy the recordings of the allocator to the fixtures, and return the files."""
    fixtures.mkdir(parents=True, exist_ok=True)
    kept = []
    for name in (GOLDEN_FILE, TRACES_FILE):
        file = folder / name
        if file.exists() and file.stat().st_size <= LARGEST_FIXTURE_BYTES:
            kept.append(fixtures / f"{slug}_{name}")
            shutil.copyfile(file, kept[-1])
    return kept


def keep_results(rows: list[dict[str, Any]], found: Found, results: Path) -> Path:
    """Write the rows and the table to the results, named by GPU and date."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    file = results / f"gpu_{slug_of(found)}_{today}.json"
    content = {"command": COMMAND, "date": today, "about": found["facts/versions"], "rows": rows}
    results.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(rows))
    return file


def measured(profile: HardwareProfile, found: Found) -> HardwareProfile:
    """Return a profile with the figures that were measured on its GPU."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    figures = {
        "total": (found["facts/versions"].get("total_bytes"), "B"),
        "context": (max(found.get("facts/context", {}).values(), default=None), "B"),
        "memory_bandwidth": (found.get("facts/speeds", {}).get("bytes_per_second"), "B/s"),
        "dense_bf16": (found.get("facts/speeds", {}).get("bf16_per_second"), "FLOP/s"),
    }
    return msgspec.structs.replace(
        profile,
        **{
            name: Figure(value=int(value), unit=unit, source=COMMAND, date=today, measured=True)
            for name, (value, unit) in figures.items()
            if value
        },
    )


def read_golden(file: Path) -> list[tuple[str, int, int]]:
    """Read the entries of an allocator: action, address and size."""
    content = json.loads(gzip.decompress(file.read_bytes()))
    return [(action, address, size) for action, address, size in content["entries"]]


def read_traces(file: Path) -> dict[tuple[str, str], dict[int, list[tuple[int, int]]]]:
    """Read the events of steps by workload and precision, then by micro-batch."""
    found: dict[tuple[str, str], dict[int, list[tuple[int, int]]]] = {}
    for line in gzip.decompress(file.read_bytes()).decode().splitlines():
        row = json.loads(line)
        events = [(block, size) for block, size in row["events"]]
        found.setdefault((row["workload"], row["precision"]), {})[row["micro_batch"]] = events
    return found


if __name__ == "__main__":
    main()
