"""Figures of the footprint benchmark, computed from its rows alone so that tests can check them."""

from __future__ import annotations

import statistics
from typing import Any

UNDER = 0.02
"""Share below the truth from which a prediction counts as an underestimate."""
RECURRENT = "recurrent"


def relative(predicted: int, true: int) -> float:
    """Return the signed error; negative if the prediction is too low."""
    return predicted / true - 1


def figures(errors: list[float]) -> dict[str, Any]:
    """Summarise a list of signed relative errors."""
    if not errors:
        return {"cases": 0, "median": None, "worst": None, "lowest": None, "under": 0, "under_share": None}
    under = sum(error < -UNDER for error in errors)
    return {
        "cases": len(errors),
        "median": statistics.median(abs(error) for error in errors),
        "worst": max(errors, key=abs),
        "lowest": min(errors),
        "under": under,
        "under_share": under / len(errors),
    }


def is_trusted(row: dict[str, Any]) -> bool:
    """Check if autobatch uses the prediction; it notes itself that it does not for recurrent layers."""
    return not any(RECURRENT in note for note in row["notes"])


def errors(rows: list[dict[str, Any]], truth: str, figure: str) -> list[float]:
    return [relative(size["predicted"][figure], size[truth][figure]) for row in rows for size in row["sizes"]]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the headline figures of the predictions that are used; the table has all of them."""
    trusted = [row for row in rows if is_trusted(row)]
    limits = [limit for row in trusted for limit in row["limits"]]
    theirs = [row["memtracker"] for row in trusted]
    seen = [one for one in theirs if one["peak_bytes"] is not None]
    return {
        "workloads": len({row["workload"] for row in trusted}),
        **{
            f"{figure}_against_{truth}": figures(errors(trusted, truth, figure))
            for truth in ("tensors", "process")
            for figure in ("allocated", "reserved")
        },
        "limits": len(limits),
        "limits_exact": sum(one["it_runs"] and not one["one_more_runs"] for one in limits),
        "limits_too_high": sum(not one["it_runs"] for one in limits),
        "limits_a_probe_agrees": sum(one["a_probe_agrees"] for one in limits),
        "memtracker": figures([relative(one["peak_bytes"], one["live_bytes"]) for one in seen]),
        "memtracker_failed": len(theirs) - len(seen),
        "memtracker_cpu_seconds": statistics.median([one["cpu_seconds"] for one in seen] or [0.0]),
        "our_cpu_seconds": statistics.median([row["cpu_seconds"] for row in trusted] or [0.0]),
    }


def markdown(content: dict[str, Any]) -> str:
    """Return the page of a result."""
    found, versions = content["summary"], content["versions"]
    lines = [
        f"# Footprint, predicted and real ({content['date']})",
        "",
        f"{content['hardware']}; torch {versions['torch']}, Python {versions['python']}; "
        f"`{content['command']}`, {content['wall_seconds']} s. If the load shows other work on the machine, "
        "compare processor time.",
        "",
        f"{found['workloads']} workloads in fp32 and bf16, micro-batches of {_sizes(content)}, traced at 2, "
        "3 and 5. Errors are relative; underestimates are those over 2 %.",
        "",
        "| predicted | truth | cases | median error | worst | lowest | underestimates |",
        "|---|---|---|---|---|---|---|",
    ]
    for truth, words in (("tensors", "tensors of a real run"), ("process", "all the process allocated")):
        for figure in ("allocated", "reserved"):
            lines.append(f"| peak {figure} | {words} | {_figures(found[f'{figure}_against_{truth}'])} |")
    lines += [
        f"| MemTracker, live bytes | tensors of a real run | {_figures(found['memtracker'])} |",
        "",
        f"Largest micro-batch under a budget: {found['limits_exact']} of {found['limits']} exact (it runs, "
        f"one more does not), {found['limits_too_high']} too high. A probe also tries the steps in another "
        f"order, from nothing cached: {found['limits_a_probe_agrees']} of {found['limits']} survive that too "
        "(budgets of a few MiB, where one segment of 2 MiB is a large part).",
        "",
        f"Processor seconds, median: {found['our_cpu_seconds']:.2f} for all micro-batches at once, nothing "
        f"run; MemTracker {found['memtracker_cpu_seconds']:.2f} for one micro-batch, which it runs "
        f"({found['memtracker_failed']} cases failed).",
        "",
        *_estimates(content["estimates"]),
        "",
        "## Every workload",
        "",
        "The worst error over the sizes. Besides tensors, the process allocates scratch space of oneDNN.",
        "`*`: recurrent layers, which autobatch does not trust a trace for; it probes them.",
        "",
        "| workload | precision | allocated, tensors | reserved, tensors | allocated, process | MemTracker |"
        " limits exact |",
        "|---|---|---|---|---|---|---|",
        *(_row(row) for row in content["workloads"]),
        "",
    ]
    return "\n".join(lines)


def _sizes(content: dict[str, Any]) -> str:
    return ", ".join(str(size["micro_batch"]) for size in content["workloads"][0]["sizes"])


def _figures(found: dict[str, Any]) -> str:
    if not found["cases"]:
        return "0 | | | | "
    return (
        f"{found['cases']} | {found['median']:.2%} | {found['worst']:+.2%} | {found['lowest']:+.2%} | "
        f"{found['under']} ({found['under_share']:.0%})"
    )


def _estimates(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| estimate of | GPUs | remedies | seconds | processor seconds | peak memory | load before |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failure" in row:
            lines.append(f"| {row['model']} | | | {row['failure']} | | | |")
            continue
        lines.append(
            f"| {row['model']}, {row['length']} tokens | {', '.join(row['gpus'])} | "
            f"{'traced' if row['with_remedies'] else 'no'} | {row['wall_seconds']:.1f} | "
            f"{row['cpu_seconds']:.1f} | {row['peak_rss_bytes'] >> 20:,} MiB | {row['load_before']:.1f} |"
        )
    return lines


def _row(row: dict[str, Any]) -> str:
    worst = {
        (figure, truth): max(errors([row], truth, figure), key=abs)
        for figure, truth in (("allocated", "tensors"), ("reserved", "tensors"), ("allocated", "process"))
    }
    theirs = row["memtracker"]
    tracked = (
        f"{relative(theirs['peak_bytes'], theirs['live_bytes']):+.2%}"
        if theirs["peak_bytes"] is not None
        else theirs["failure"].split(":")[0]
    )
    exact = sum(one["it_runs"] and not one["one_more_runs"] for one in row["limits"])
    name = row["workload"] + ("" if is_trusted(row) else " *")
    cells = [f"{error:+.2%}" for error in worst.values()]
    return (
        f"| {name} | {row['precision']} | {' | '.join(cells)} | {tracked} | {exact} of {len(row['limits'])} |"
    )
