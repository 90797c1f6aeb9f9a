"""The claims of the project that only a GPU can confirm, each beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from autobatch.core.units import format_bytes
from benchmarks.gpu.work import DONE, Row
from benchmarks.report import markdown

Found = dict[str, dict[str, Any]]
"""What each unit found, by name."""


def table(latest: Mapping[str, Row]) -> str:
    """Return Markdown: the GPU, every claim and what was measured, and what failed or is left."""
    found = {name: row["found"] for name, row in latest.items() if row["status"] == DONE}
    about = found.get("facts/versions", {})
    head = f"{about.get('gpu', 'unknown GPU')}, torch {about.get('torch')}, CUDA {about.get('cuda')}"
    rows = [(claim, _measured(read, found)) for claim, read in CLAIMS.items()]
    bad = [f"- {name}: {row.get('error')}\n" for name, row in latest.items() if row["status"] != DONE]
    text = f"{head}\n\n{markdown(('claimed', 'measured'), rows)}"
    return f"{text}\nNot measured:\n\n{''.join(bad)}" if bad else text


def _measured(read: Callable[[Found], str], found: Found) -> str:
    try:
        return read(found)
    except (KeyError, TypeError, ValueError):  # the unit is missing, or has no figure
        return "not measured"


def part(found: Found, prefix: str, key: str = "") -> list[dict[str, Any]]:
    """Return what the units of a part found, or those of them that have a key."""
    return [row for name, row in found.items() if name.startswith(prefix) and (not key or key in row)]


def limits(found: Found) -> str:
    """Return how many limits are exact, with runs and errors."""
    rows = part(found, "limit/")
    runs, errors = ([row[name] for row in rows] for name in ("runs", "errors"))
    return (
        f"{sum(row['exact'] for row in rows)} of {len(rows)} exact; {median(runs):g} runs and "
        f"{median(errors):g} errors in the median, {max(runs)} and {max(errors)} at most"
    )


def estimates(found: Found) -> str:
    """Return the range of predicted peaks over real ones."""
    said = []
    for kind in ("allocated", "reserved"):
        rows = part(found, "limit/", "estimate")
        ratios = [row["estimate"][f"{kind}_bytes"] / row["loop"][f"{kind}_bytes"] for row in rows]
        said.append(f"{kind}: {min(ratios):.3f} to {max(ratios):.3f}, {median(ratios):.4f} in the median")
    return "; ".join(said)


def recordings(found: Found) -> str:
    """Return how many blocks lie where the GPU put them."""
    rows = [replay for row in part(found, "record/") for replay in row["replays"]]
    same, blocks = (sum(row[name] for row in rows) for name in ("same", "allocations"))
    equal = sum(row["peak_bytes"] == row["model_peak_bytes"] for row in rows)
    return f"{same} of {blocks} blocks at their address, {equal} of {len(rows)} reserved peaks equal"


def growth(found: Found) -> str:
    """Return what kernels and libraries add outside of the allocator."""
    sizes = list(found["facts/context"].values())
    return f"{format_bytes(sizes[0])}, then {format_bytes(sizes[-1] - sizes[0])} more"


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
    counts = ", ".join(f"{row[name]} {name}" for name in ("passed", "failed", "skipped"))
    return "; ".join([counts, *row["failures"]])


CLAIMS: dict[str, Callable[[Found], str]] = {
    "the probe finds the largest micro-batch: a plain loop runs at it, and not at one more": limits,
    "predicted peaks agree with those of the plain loop": estimates,
    "the model of the allocator puts each block where the GPU does": recordings,
    "what grows outside the allocator stays within the headroom": growth,
    "the loop costs at most 5 % over one written by hand": lambda found: ", ".join(
        f"{way} {row['workload']} {ratio:.3f}"
        for row in part(found, "speed/", "wall")
        for way, ratio in row["wall"].items()
    ),
    "samples of many lengths train faster if split by size": lambda found: (
        f"{found['speed/ragged']['by_size']} of the time of a split by count"
    ),
    "the demo runs, and the saved limit answers the second time": lambda found: ", ".join(
        f"{name}: exit {row['exit']}, {row['seconds']} s" for name, row in found["fit/demo"].items()
    ),
    "a resumed run has the same weights, bit for bit": resume,
    "the tests for a GPU pass": tests,
    "tuning gains over the largest micro-batch": lambda found: f"at least {found['speed/tuned']['gain']}",
}
"""Every claim, and the function that reads what was measured for it."""
