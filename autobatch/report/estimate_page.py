"""The page of an estimate: what fits on each GPU, and where the memory of each goes."""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.core.records.estimate import Estimate, Remedy
from autobatch.core.units import format_bytes
from autobatch.report.charts.drawing import Picture, Table
from autobatch.report.charts.sizes import lengths_figure, padding_figure
from autobatch.report.html import Markup, element, figure, prose, table
from autobatch.report.page import page_of
from autobatch.report.result import Estimates
from autobatch.report.summary import describe_split
from autobatch.report.words import count, plural

TOP_MODULES = 8
"""Modules that the memory of a GPU names, those with the most activations."""


def estimate_page(found: Estimates, title: str) -> str:
    """Build the page of an estimate.

    Args:
        found: the predictions, in the order in which they are shown.
        title: what was estimated.
    """
    fitting = sum(one.fits for one in found.estimates)
    words = (
        f"Predicted to fit on {fitting} of {plural(len(found.estimates), 'GPU')}, from shapes alone. No GPU "
        "was used."
    )
    body = element(
        "body",
        element("header", element("h1", title), element("p", words, class_="verdict")),
        element(
            "main", table(_gpus(found)), _memories(found), [element("p", prose(one)) for one in found.notes]
        ),
    )
    return page_of(f"{title}: which GPU", body)


def _gpus(found: Estimates) -> Table:
    head = ["GPU", "Budget", "Micro-batch", "Optimizer step", "Peak", "Left over", "Precision"]
    return Table(caption="What fits", head=head, rows=[_row(one) for one in found.estimates])


def _row(one: Estimate) -> list[str]:
    peak = one.peak_allocated_bytes if one.peak_reserved_bytes is None else one.peak_reserved_bytes
    return [
        one.profile,
        format_bytes(one.budget_bytes),
        count(one.micro_batch) if one.fits else "does not fit",
        "" if one.plan is None or not one.fits else describe_split(one.plan),
        format_bytes(peak),
        format_bytes(one.budget_bytes - peak) if one.fits else "",
        one.precision,
    ]


def _with_change(remedy: Remedy) -> str:
    if remedy.micro_batch:
        return f"{count(remedy.micro_batch)} fit"
    return f"does not fit: {format_bytes(remedy.peak_bytes)}"


def _sizes(one: Estimate) -> Iterator[Markup]:
    """Yield the largest micro-batch by size, and the padding of both splits, if samples differ in size."""
    for picture in (lengths_figure(one.lengths, one.size_unit), _padding(one)):
        if picture is not None:
            yield figure(picture)


def _padding(one: Estimate) -> Picture | None:
    return None if one.size_cut is None else padding_figure(one.size_cut)


def _memories(found: Estimates) -> Iterator[Markup]:
    """Yield the memory of each GPU at its peak, collapsed."""
    for one in found.estimates:
        yield from _sizes(one)
        rows = [[kind, format_bytes(size)] for kind, size in one.memory.items() if size]
        rows += [
            [f"activations of {name}", format_bytes(size)]
            for name, size in list(one.modules.items())[:TOP_MODULES]
            if size
        ]
        rows += [[f"with {remedy.name}", _with_change(remedy)] for remedy in one.remedies or ()]
        if rows:
            caption = f"{one.profile}: memory at the peak, in phase {one.phase}"
            shown = table(Table(caption=caption, head=["Part", "Bytes"], rows=rows))
            yield element("details", element("summary", f"Memory on {one.profile}"), shown)
