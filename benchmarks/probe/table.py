"""The results as Markdown."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.probe.limits import LATER, NEIGHBOURS

HEAD = (
    "| finder | limits | found ÷ true: worst … best, median | runs: median, most "
    "| out-of-memory errors: median, most | over (ran out later) | seconds: median, most |"
)


def markdown(environment: dict[str, Any], limits: list[dict[str, Any]]) -> str:
    exact = sum(one["exact"] for one in limits)
    names = list(dict.fromkeys(name for one in limits for name in one["finders"]))
    env = environment
    lines = [
        "# Finding the limit",
        "",
        f"`{env['command']}` on {env['date']}: {env['cpu']}, {env['cores']} cores, {env['memory']};",
        f"Python {env['python']}, torch {env['torch']}, accelerate {env['accelerate']},",
        f"lightning {env['lightning']}; {env['seconds']} s in total.",
        "",
        f"**autobatch is exact in {exact} of {len(limits)} limits**: its answer ran and fits, and the next",
        "size does not fit in a real attempt (or the answer is the cap).",
    ]
    for title, chosen in (
        ("All limits", limits),
        ("Host memory (`cpu`)", [one for one in limits if one["device"] == "cpu"]),
        ("A simulated T4 (`sim:t4`)", [one for one in limits if one["device"] != "cpu"]),
    ):
        lines += ["", f"## {title}", "", HEAD, "|---" * 7 + "|", *(row(name, chosen) for name in names)]
    return "\n".join([*lines, "", *notes(environment), "", *details(limits), ""])


def row(name: str, limits: list[dict[str, Any]]) -> str:
    """Return the row of one finder over some limits."""
    # A limit under which nothing fits has no share to find.
    pairs = [(one["true"], one["finders"][name]) for one in limits if one["true"] and name in one["finders"]]
    answers = [(true, answer) for true, answer in pairs if answer is not None]
    if not answers:
        return f"| {name} | – | left out: not installed | | | | |"
    shares = sorted(answer["found"] / true for true, answer in answers)
    over = sum(answer["steps_later"] < LATER for _, answer in answers)
    cells = [
        name,
        f"{len(answers)}",
        f"{shares[0]:.3f} … {shares[-1]:.3f}, {median(shares):.3f}",
        spread(answers, "runs"),
        spread(answers, "ooms"),
        f"{over}",
        spread(answers, "seconds", ".2f"),
    ]
    return f"| {' | '.join(cells)} |"


def spread(answers: list[tuple[int, dict[str, Any]]], field: str, form: str = "g") -> str:
    values = [answer[field] for _, answer in answers]
    return f"{median(values):{form}}, {max(values):{form}}"


def notes(environment: dict[str, Any]) -> list[str]:
    return [
        "## How",
        "",
        "- All finders run under the same meter. On `cpu` it counts the bytes of tensors against the budget.",
        "  On `sim:t4` they go through a model of CUDA's caching allocator. Batches count after collation.",
        "- Real attempts alone give the truth (doubling, then bisection). On `sim:t4`, where memory need not",
        f"  be monotone, every size within {NEIGHBOURS} of the answers runs as well. A search that ends at",
        "  the nearest boundary can be under 1 there.",
        f"- Over: one of {LATER} steps of two micro-batches on random samples ran out of memory.",
        "- accelerate runs the steps that autobatch runs (three optimizer steps). The decorated function",
        "  builds model and optimizer. It starts from the whole dataset if that is under 4096.",
        "- Lightning runs with its defaults, `accumulate_grad_batches=2`, no logger and no checkpoints, on",
        f"  {', '.join(environment['lightning_on'])}.",
        "- Seconds are those of two processes at the same time. Compare them only with one another.",
    ]


def details(limits: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Every limit",
        "",
        "| workload | device | budget | true | found | predicted | bounded by | runs | OOM errors | exact |",
        "|---" * 10 + "|",
    ]
    for one in limits:
        answer = one["finders"]["autobatch"]
        bound = answer.get("upper_bound_by")
        if bound == "cap":
            bound = f"cap ({answer['limited_by']})"
        lines.append(
            f"| {one['workload']} | {one['device']} | {one['budget']} | {one['true']} | {answer['found']} "
            f"| {answer.get('predicted')} | {bound} | {answer['runs']} | {answer['ooms']} "
            f"| {'yes' if one['exact'] else '**no**'} |"
        )
    return lines
