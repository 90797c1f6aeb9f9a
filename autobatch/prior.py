"""What a step allocates, before anything has run: what makes the first guess of a search the last one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from autobatch.attempt import OTHER_WINDOWS, WINDOWS, Bench
from autobatch.bench import Facts, facts_of, new_allocator
from autobatch.errors import AutobatchError
from autobatch.footprint.allocator import Allocator
from autobatch.footprint.curve import memory_curve, predicted_points
from autobatch.footprint.predict import Footprint, footprint, with_workspaces
from autobatch.footprint.program import Program, Untraceable, replay
from autobatch.footprint.recorder import Setting
from autobatch.footprint.remedies import Spending, find_remedies
from autobatch.hardware import data_home, match_profile
from autobatch.knobs import COMPILE
from autobatch.records import MemoryCurve, PredictedPoint, Remedy
from autobatch.state import preserved_random_state


def prior_footprint(bench: Bench, windows: Sequence[int] = WINDOWS) -> Footprint | None:
    """Trace an attempt on tensors without memory; ``None`` where that would not tell what will be recorded.

    On a card the first runs tell more: its libraries take workspaces that no trace sees.

    Args:
        bench: what attempts run on.
        windows: micro-batches a window.
    """
    if bench.device.kind == "cuda":
        return None
    try:
        # Data that is augmented draws while it is read.
        with preserved_random_state():
            return footprint(replace(_setting(bench), windows=windows))
    except AutobatchError:
        # Whatever cannot be traced is run.
        return None


def other_order(bench: Bench) -> Program | None:
    """What the second look of an attempt allocates; ``None`` where it cannot be traced."""
    step = prior_footprint(bench, OTHER_WINDOWS)
    return None if step is None else step.program


def traced_peak(bench: Bench, micro_batch: int) -> int | None:
    """Peak reserved of a micro-batch on a card, in bytes, as a trace alone predicts it.

    For comparison with what a run measured there; ``None`` on other devices, and where it cannot be traced.
    """
    if bench.device.kind != "cuda":
        return None
    device = bench.device.describe()
    capability = torch.cuda.get_device_capability(bench.device.torch_device)
    card = match_profile(device.name, device.total_bytes, capability, user_dir=data_home(os.environ))
    try:
        with preserved_random_state():
            program = with_workspaces(footprint(_setting(bench)), None if card is None else card.workspaces)
        unlimited = new_allocator(facts_of(bench), capped=False)
        return replay(program.at(micro_batch), unlimited).peak_reserved_bytes
    except AutobatchError:
        return None


def remedies_of(bench: Bench, step: Footprint | None) -> list[Remedy]:
    """What would let a micro-batch fit that does not; nothing where the step cannot be traced.

    Args:
        bench: what was probed.
        step: its footprint, if that was traced already.
    """
    facts = facts_of(bench)

    def allocator(expandable: bool) -> Allocator | None:
        if expandable and facts.device.kind == "cpu":
            return None
        return new_allocator(facts, expandable=expandable)

    spending = Spending(
        allocator=allocator,
        unlimited=lambda expandable: new_allocator(facts, capped=False, expandable=expandable),
        cap=facts.samples,
        expandable=facts.expandable_segments,
    )
    setting = _setting(bench)
    try:
        with preserved_random_state():
            return find_remedies(setting, step or footprint(setting), spending)
    except AutobatchError:
        return []


def pictures(
    step: Footprint | None, facts: Facts, micro_batch: int
) -> tuple[list[PredictedPoint], MemoryCurve | None]:
    """Predicted peaks around an answer, and where the memory goes over a step at it; where it was traced."""
    if step is None:
        return [], None

    def unlimited() -> Allocator:
        return new_allocator(facts, capped=False)

    try:
        curve = memory_curve(step, micro_batch, unlimited())
    except Untraceable:
        return [], None
    return predicted_points(step, micro_batch, unlimited, facts.samples), curve


def _setting(bench: Bench) -> Setting:
    """What an attempt on the bench does; with the operators of the card, where it is one."""
    card = bench.device.torch_device if bench.device.kind == "cuda" else None
    return Setting(
        workload=bench.workload,
        model=bench.model,
        batch_of=bench.costliest.batch,
        precision=bench.precision,
        capability=None if card is None else torch.cuda.get_device_capability(card),
        windows=WINDOWS,
        samples=bench.window,
        max_grad_norm=bench.max_grad_norm,
        ema=bench.ema,
        # A compiled model is predicted as its module runs without the compiler.
        knobs={name: value for name, value in bench.knobs.items() if name != COMPILE},
    )
