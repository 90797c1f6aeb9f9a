"""Options as a command makes them."""

from __future__ import annotations

from typing import Any

from autobatch.core.options import Options, options_from


def required(command: str) -> dict[str, Any]:
    """Return the options that a command needs."""
    return {"target_batch": 32} if command in ("plan", "tune", "fit") else {}


def as_options(command: str, **values: Any) -> Options:
    """Return the options of a command."""
    return options_from(command, values)
