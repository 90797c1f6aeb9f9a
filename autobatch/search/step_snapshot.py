"""A snapshot of real steps for pytorch.org/memory_viz."""

from __future__ import annotations

from collections.abc import Mapping

from autobatch.core.knobs import Value
from autobatch.device.cuda_allocator import snapshot_of
from autobatch.search.questions import ask_or_none
from autobatch.setup.attempt import attempt
from autobatch.setup.session import Session, SetupProcess
from autobatch.setup.setup import with_knobs


def step_snapshot(process: SetupProcess, micro_batch: int, knobs: Mapping[str, Value]) -> bytes | None:
    """Run the steps of an attempt, and return the content of a file for the page.

    Args:
        process: holds the setup.
        micro_batch: samples of each micro-batch.
        knobs: the configuration.

    Returns:
        None if the steps do not fit, or do not run on CUDA.
    """
    return ask_or_none(process, "recording the memory of a few steps", _snapshot, micro_batch, dict(knobs))


def _snapshot(session: Session, micro_batch: int, knobs: dict[str, Value]) -> bytes | None:
    setup = with_knobs(session.setup, knobs)
    if setup.device.torch_device.type != "cuda":
        return None
    outcome, content = snapshot_of(lambda: attempt(setup, micro_batch))
    return content if outcome.attempt.fits else None
