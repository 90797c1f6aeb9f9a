"""What may be tuned: each knob says its choices, when it applies and what it does. In one place, as data."""

from __future__ import annotations

from typing import NamedTuple

from autobatch.records import Precision

Value = str | int | float | bool | None


class Situation(NamedTuple):
    """What decides which knobs apply."""

    device_kind: str
    """``cuda``, ``cpu`` or ``sim``."""
    precision_is_open: bool
    """No precision was asked for."""
    bf16_is_native: bool
    fused_optimizer: bool
    """The workload's optimizer has a fused implementation on this device."""
    micro_batch_limit: int
    samples: int
    """Samples that one rank runs in a window."""


class Knob(NamedTuple):
    """One thing that may be tuned."""

    name: str
    choices: tuple[Value, ...]
    """The first is the default."""
    effect: str
    """What it does, for people."""


SHIFTS = 4
"""How often the micro-batch may be halved."""


def applicable(situation: Situation) -> list[Knob]:
    """The knobs that make a difference here, each with the choices that are possible."""
    knobs = [
        Knob(
            "micro_batch_shift",
            tuple(range(min(SHIFTS, _halvings(situation)))),
            "halves the micro-batch: the largest that fits is not always the fastest",
        )
    ]
    if situation.precision_is_open:
        choices: tuple[Precision, ...] = ("bf16", "fp32") if situation.bf16_is_native else ("fp32",)
        knobs.append(Knob("precision", choices, "what the forward pass computes in"))
    if situation.fused_optimizer:
        knobs.append(Knob("fused", (False, True), "one kernel for the whole optimizer step"))
    return [knob for knob in knobs if len(knob.choices) > 1]


def defaults(knobs: list[Knob]) -> dict[str, Value]:
    """Every knob at its default."""
    return {knob.name: knob.choices[0] for knob in knobs}


def _halvings(situation: Situation) -> int:
    return min(situation.micro_batch_limit, situation.samples).bit_length()
