"""Numbers and choices in words."""

from __future__ import annotations

from collections.abc import Mapping

from autobatch.core.knobs import CHECKPOINTING, PRECISION, SPLIT
from autobatch.core.units import significant

LARGE_LOSS = 1e6
"""From here on, digits after the point tell nothing."""


def decimal(number: float | None, digits: int = 4) -> str:
    """Write a number with a few significant digits; ``None`` becomes ``unknown``."""
    return "unknown" if number is None else significant(number, digits)


def moment(created: str | None) -> str:
    """Write a time of a record, which is UTC, to the minute: ``2026-11-22 17:14 UTC``; empty for None."""
    return f"{created[:16].replace('T', ' ')} UTC" if created else ""


def plural(number: int, one: str, more: str | None = None) -> str:
    """Write a number with its noun: ``1 sample``, ``2 samples``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def metric_in_words(name: str, value: float | None) -> str:
    """Write a held-out figure: ``accuracy 97.22 %``, ``loss 0.1017``."""
    if value is None:
        return f"{name} not finite"
    is_share = "acc" in name and 0 <= value <= 1
    return f"{name} {100 * value:.2f} %" if is_share else f"{name} {decimal(value)}"


def metrics_in_words(validation: Mapping[str, float | None]) -> list[str]:
    """Write the held-out figures, the loss after the others."""
    figures = sorted(validation.items(), key=lambda item: item[0] == "loss")
    return [metric_in_words(name, value) for name, value in figures]


def loss_in_words(loss: float) -> str:
    """Write a training loss: ``0.1017``, ``2.31e+14``."""
    return f"{loss:.4f}" if abs(loss) < LARGE_LOSS else f"{loss:.3g}"


def terms_in_words(terms: Mapping[str, float | None]) -> str:
    """Write the terms whose sum is a loss, to follow it: `` (boxes 0.31, classes 0.7)``; empty for none."""
    return f" ({', '.join(metric_in_words(name, value) for name, value in terms.items())})" if terms else ""


def knobs_in_words(values: Mapping[str, object], between: str = ", ") -> str:
    """Write the values of knobs: ``bf16, channels-last, micro-batch halved``."""
    return between.join(_knob_in_words(name, value) for name, value in values.items())


def _knob_in_words(name: str, value: object) -> str:
    plain = name.replace("_", "-")
    if name == SPLIT and isinstance(value, int):
        few = ("largest micro-batch", "micro-batch halved")
        return few[value] if value < 2 else f"micro-batch ÷ {2**value}"
    if name == PRECISION:
        return str(value)
    if name == CHECKPOINTING:
        return f"{'no ' * (value == 'none')}{plain}"
    return f"{'' if value else 'no '}{plain}" if isinstance(value, bool) else f"{plain} {value}"
