"""The claims of the project that only a GPU can confirm, each beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from autobatch.core.units import format_bytes
from benchmarks.gpu.journal import DONE, latest

Found = dict[str, dict[str, Any]]
"""What each unit found, by name."""
UNKNOWN = "not measured"


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown: the GPU, every claim and what was measured, and what failed or is left."""
    last = latest(rows)
    found = {name: row["found"] for name, row in last.items() if row["status"] == DONE}
    lines = [heading(found), "", "| claimed | measured |", "|---|---|"]
    lines += [f"| {claim} | {_measured(read, found)} |" for claim, read in CLAIMS.items()]
    bad = [f"- {name}: {row.get('error')}" for name, row in last.items() if row["status"] != DONE]
    if bad:
        lines += ["", "Not measured:", "", *bad]
    return "\n".join(lines) + "\n"


def heading(found: Found) -> str:
    """Return the GPU and the versions in one line."""
    about = found.get("facts/versions", {})
    return f"{about.get('gpu', 'unknown GPU')}, torch {about.get('torch')}, CUDA {about.get('cuda')}"


def limits(found: Found) -> str:
    """Return how many limits are exact, with runs and errors."""
    rows = part(found, "limit/")
    exact = sum(row["exact"] for row in rows)
    runs, errors = ([row[name] for row in rows] for name in ("runs", "errors"))
    return (
        f"{exact} of {len(rows)} exact; {statistics.median(runs):g} runs and {statistics.median(errors):g} "
        f"errors in the median, {max(runs)} and {max(errors)} at most"
    )


def estimates(found: Found) -> str:
    """Return the range of predicted peaks over real ones."""
    said = []
    for kind in ("allocated", "reserved"):
        rows = part(found, "limit/", "estimate")
        ratios = [row["estimate"][f"{kind}_bytes"] / row["loop"][f"{kind}_bytes"] for row in rows]
        said.append(
            f"{kind}: {min(ratios):.3f} to {max(ratios):.3f}, {statistics.median(ratios):.4f} in the median"
        )
    return "; ".join(said)


def allocator(found: Found) -> str:
    """Return how often the model of the allocator reserves another amount."""
    row = found["facts/golden"]
    return f"{row['mismatches']} of {row['entries']} entries differ"


def alike(found: Found) -> str:
    """Return whether equal runs have equal events, and how many events are no straight line."""
    rows = part(found, "facts/traces")
    same = sum(row["same_twice"] for row in rows)
    bent = ", ".join(str(row["bent"]) for row in rows)
    structure = sum(row["alike"] for row in rows)
    return (
        f"same events twice in {same} of {len(rows)}; alike at 16, 32 and 64 in {structure}; "
        f"bent events: {bent}"
    )


def cap(found: Found) -> str:
    """Return how full the budget became, and by how much it was exceeded."""
    rows = {name: row for name, row in found["facts/cap"].items() if isinstance(row, dict)}
    return "; ".join(
        f"{name}: {row['pieces']} of 50 pieces, peak {format_bytes(row['peak_reserved_bytes'])} of "
        f"{format_bytes(row['budget_bytes'])}"
        for name, row in rows.items()
    )


def sessions(found: Found) -> str:
    """Return what is reserved as sessions start."""
    return f"reserved at the start: {found['facts/sessions']['reserved_bytes']}"


def growth(found: Found) -> str:
    """Return what kernels and libraries add outside of the allocator."""
    sizes = list(found["facts/context"].values())
    return f"{format_bytes(sizes[0])}, then {format_bytes(sizes[-1] - sizes[0])} more"


def loop(found: Found) -> str:
    """Return the ratios of the loop."""
    rows = part(found, "speed/", "ratio")
    return ", ".join(f"{row['workload']} {row['ratio']:.3f}" for row in rows)


def commands(found: Found) -> str:
    """Return exit codes and seconds of the demo."""
    row = found["fit/demo"]
    return ", ".join(
        f"{name}: exit {row[name]['exit']}, {row[name]['seconds']} s" for name in ("first", "second")
    )


def resume(found: Found) -> str:
    """Return whether the weights of a resumed run are equal."""
    row = found["fit/resume"]
    if not row["stopped_within"]:
        return f"the run ended before it was stopped: exits {row['exits']}"
    if row["equal"]:
        return "equal weights"
    if not row["repeatable"]:
        return "other weights, as of two uninterrupted runs: the kernels are not deterministic"
    return f"other weights: exits {row['exits']}"


def tests(found: Found) -> str:
    """Return the outcomes of the tests for a GPU."""
    row = found["tests/gpu"]
    names = "; ".join(row["failures"])
    return f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped" + (
        f": {names}" if names else ""
    )


def gain(found: Found) -> str:
    """Return what tuning gains at least."""
    row = found["speed/tuned"]
    return f"{row['workload']} {'nothing' if row['gain'] is None else format(row['gain'], '.2f')}"


def part(found: Found, prefix: str, key: str | None = None) -> list[dict[str, Any]]:
    """Return what the units of a part found, or those that have a key.

    Raises:
        KeyError: There are none.
    """
    rows = [row for name, row in found.items() if name.startswith(prefix) and (key is None or key in row)]
    if not rows:
        raise KeyError(prefix)
    return rows


def _measured(read: Callable[[Found], str], found: Found) -> str:
    try:
        return read(found)
    except (KeyError, TypeError):  # the unit is missing, or has no figure
        return UNKNOWN


CLAIMS: dict[str, Callable[[Found], str]] = {
    "the probe finds the largest micro-batch: a plain loop runs at it, and not at one more": limits,
    "predicted peaks agree with those of the plain loop": estimates,
    "the model of the allocator reserves what the GPU reserves": allocator,
    "events are the same in equal runs, and straight lines over the micro-batch": alike,
    "the budget is never exceeded, and can be filled": cap,
    "sessions start from nothing": sessions,
    "what grows outside the allocator stays within the headroom": growth,
    "the loop costs at most 5 % over one written by hand": loop,
    "the demo runs, and the saved limit answers the second time": commands,
    "a resumed run has the same weights, bit for bit": resume,
    "the tests for a GPU pass": tests,
    "tuning gains over the largest micro-batch": gain,
}
"""Every claim, and the function that reads what was measured for it."""
