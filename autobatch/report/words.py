"""Numbers and choices in words."""

from __future__ import annotations

from collections.abc import Mapping

from autobatch.core.units import significant


def count(number: int) -> str:
    """Write a whole number with thousands separators."""
    return f"{number:,}"


def decimal(number: float | None, digits: int = 4) -> str:
    """Write a number with a few significant digits; ``None`` becomes ``unknown``."""
    return "unknown" if number is None else significant(number, digits)


def moment(created: str) -> str:
    """Write a time of a record, which is UTC, to the minute: ``2026-11-22 17:14 UTC``."""
    return f"{created[:16].replace('T', ' ')} UTC"


def plural(number: int, one: str, more: str | None = None) -> str:
    """Write a number with its noun: ``1 sample``, ``2 samples``."""
    return f"{count(number)} {one if number == 1 else more or one + 's'}"


def percent(share: float) -> str:
    """Write a share as whole percent: ``31 %``, ``-2 %``."""
    return f"{100 * share:.0f} %".replace("-0 %", "0 %")


def ratio_in_words(ratio: float) -> str:
    """Write a ratio of speeds: ``31 % faster``, ``2 % slower``, ``as fast``."""
    change = percent(abs(ratio - 1))
    return "as fast" if change == "0 %" else f"{change} {'faster' if ratio > 1 else 'slower'}"


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


def terms_in_words(terms: Mapping[str, float | None]) -> str:
    """Write the terms whose sum is a loss, to follow it: `` (boxes 0.31, classes 0.7)``; empty for none."""
    return f" ({', '.join(metric_in_words(name, value) for name, value in terms.items())})" if terms else ""


def knobs_in_words(values: Mapping[str, object], between: str = ", ") -> str:
    """Write the values of knobs: ``bf16, channels-last, micro-batch halved``."""
    return between.join(_knob_in_words(name, value) for name, value in values.items())


def _knob_in_words(name: str, value: object) -> str:
    words = f"{name.replace('_', ' ')} {value}"
    match name, value:
        case "micro_batch_shift", int(times):
            halved = "micro-batch halved" + (f" {times} times" if times > 1 else "")
            words = halved if times else "largest micro-batch"
        case "precision", _:
            words = str(value)
        case "checkpointing", _:
            words = "no checkpointing" if value == "none" else "checkpointing"
        case "compile", _:
            words = "not compiled" if value == "off" else "compiled"
        case "optimizer", _:
            words = f"{value} optimizer"
        case "loader_workers", int(workers):
            words = plural(workers, "loader worker")
        case _, bool():
            words = ("" if value else "no ") + name.replace("_", "-")
    return words
