"""What stays of a measurement: recordings that tests replay, figures of the profile, and the table.

    python -m benchmarks.gpu.keep DIR [--profile profiles/h200.toml]

``DIR`` has the results of ``python -m benchmarks.gpu --out DIR``.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
import sys
from pathlib import Path

import msgspec

from autobatch.device.profiles import Figure, HardwareProfile, read_profile
from benchmarks.gpu.claims import Found, table
from benchmarks.gpu.work import DONE, FILE, Journal
from benchmarks.report import RESULTS, arguments

RECORDINGS = Path(__file__).parents[2] / "tests" / "recordings"
LARGEST_FILE_BYTES = 1 << 20
"""A recording travels with the repository, so it stays small."""
COMMAND = "python -m benchmarks.gpu"


def main() -> int:
    """Write what stays of a measurement."""
    options = arguments(__doc__, dir=Path, profile=None)
    return keep(options.dir, RECORDINGS, RESULTS, options.profile)


def keep(folder: Path, recordings: Path, results: Path, profile: Path | None) -> int:
    """Copy the recordings to a folder, write rows and table to another, and fill in a profile."""
    journal = Journal(folder)
    latest = journal.latest()
    found = {name: row["found"] for name, row in latest.items() if row["status"] == DONE}
    if "facts/versions" not in found:
        print(f"{folder / FILE} has no row of facts/versions, which names the GPU", file=sys.stderr)
        return 2
    kept = recordings / slug_of(found)
    kept.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.glob("*.csv.gz")):
        if file.stat().st_size <= LARGEST_FILE_BYTES:
            print(shutil.copyfile(file, kept / file.name))
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    written = results / f"gpu_{slug_of(found)}_{today}.json"
    content = {"command": COMMAND, "date": today, "about": found["facts/versions"], "rows": journal.rows()}
    written.write_text(json.dumps(content, indent=1) + "\n")
    written.with_suffix(".md").write_text(table(latest))
    print(written)
    if profile is not None:
        profile.write_text(format_profile(measured(read_profile(profile), found, today)))
        print(profile)
    return 0


def slug_of(found: Found) -> str:
    """Return a name for files: the GPU and torch's version without its build."""
    about = found["facts/versions"]
    text = f"{about['gpu']} torch {str(about['torch']).partition('+')[0]}"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def format_profile(profile: HardwareProfile) -> str:
    """Return a profile as TOML, in the order of its fields, without unknown figures."""

    def line(key: str, value: object) -> str:
        # JSON is TOML for scalars and lists of strings, except the delete character.
        return f"{key} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f")

    known = {key: value for key, value in msgspec.to_builtins(profile).items() if value is not None}
    tables = {key: value for key, value in known.items() if isinstance(value, dict)}
    text = "".join(line(key, value) for key, value in known.items() if key not in tables)
    for name, figure in tables.items():
        text += f"\n[{name}]\n" + "".join(line(key, value) for key, value in figure.items())
    return text


def measured(profile: HardwareProfile, found: Found, date: str) -> HardwareProfile:
    """Return a profile with the figures that were measured on its GPU."""
    figures = {
        "total": found["facts/versions"].get("total_bytes"),
        "context": max(found.get("facts/context", {}).values(), default=None),
    }
    known = {
        name: Figure(value=int(value), unit="B", source=COMMAND, date=date, measured=True)
        for name, value in figures.items()
        if value
    }
    return msgspec.structs.replace(profile, **known)


if __name__ == "__main__":
    sys.exit(main())
