"""Where the memory of a step goes at its peak: by what it is for, and by module."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autobatch.footprint.budget import Ledger
from autobatch.footprint.predict import Footprint
from autobatch.footprint.program import Polynomial, replay
from autobatch.footprint.trace import FREE
from autobatch.units import format_bytes

MODULES = 3
"""How many modules a line for people names."""


class Explanation(NamedTuple):
    """Live bytes at the peak of a step."""

    micro_batch: int
    peak_bytes: int
    """The most that live tensors hold, without rounding and fragmentation."""
    phase: str
    """The phase that the peak lies in."""
    by_kind: dict[str, int]
    """Bytes of parameters, gradients and so on, the largest first."""
    by_module: dict[str, int]
    """Bytes of activations by the module that made them, the largest first."""
    per_sample_bytes: int
    """What one sample more adds to what is alive at this peak."""

    def text(self) -> str:
        """Write it in one line for people."""
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.by_kind.items() if size)
        top = [
            f"{name} {format_bytes(size)}" for name, size in list(self.by_module.items())[:MODULES] if size
        ]
        modules = f"; most activations are of {', '.join(top)}" if len(self.by_module) > 1 else ""
        return f"{format_bytes(self.peak_bytes)} at the peak, in the {self.phase}: {parts}{modules}"


def explain(step: Footprint, micro_batch: int, *, depth: int = 2) -> Explanation:
    """Say where the memory goes at the peak.

    Args:
        step: what it allocates.
        micro_batch: at which size.
        depth: how many parts of a module's name count.

    Raises:
        Untraceable: the step follows no rule at that size.
    """
    trace = step.program.at(micro_batch)
    outcome = replay(trace, Ledger())
    live: dict[int, Polynomial] = {}
    for (block, size), (_, rule) in zip(
        trace.events[: outcome.peak_at + 1], step.program.events[: outcome.peak_at + 1], strict=True
    ):
        if size == FREE:
            live.pop(block, None)
        elif rule is not None:
            live[block] = rule
    activations = [block for block in live if step.labels[block].kind == "activations"]

    def group(blocks: list[int], name: Callable[[int], str]) -> dict[str, int]:
        totals: dict[str, int] = {}
        for block in blocks:
            key = name(block)
            totals[key] = totals.get(key, 0) + live[block].at(micro_batch)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    return Explanation(
        micro_batch=micro_batch,
        peak_bytes=outcome.peak_allocated_bytes,
        phase=outcome.peak_phase or "setup",
        by_kind=group(list(live), lambda block: step.labels[block].kind),
        by_module=group(activations, lambda block: _cut(step.labels[block].module, depth)),
        per_sample_bytes=sum(rule.at(micro_batch + 1) - rule.at(micro_batch) for rule in live.values()),
    )


def _cut(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth]) or "(the model itself)"
