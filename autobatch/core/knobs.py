"""The knobs of the tuner, by name.

`autobatch.tuning.fastest` has their choices. `autobatch.step.apply_knobs` applies them to a model and its
optimizer, in the same way for a probe, a trial and the training that follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from autobatch.core.errors import InputError

Value = str | int | float | bool | None
Configuration = Mapping[str, Value]
"""Value of each knob, by name; a knob that is missing has its default."""
SPLIT = "micro_batch_shift"
"""Times that the micro-batch is halved: the largest that fits is not always the fastest."""
PRECISION = "precision"
CHECKPOINTING = "checkpointing"
"""No choice of the tuner: `autobatch.estimates` says what would fit with it."""
COMPILE = "compile"
CHANNELS_LAST = "channels_last"
OPTIMIZER = "optimizer"
LOADER_WORKERS = "loader_workers"
KNOBS = (SPLIT, PRECISION, COMPILE, CHANNELS_LAST, OPTIMIZER, LOADER_WORKERS)


def parse_knobs(text: str) -> list[str]:
    """Split the value of ``--knobs`` (``micro_batch_shift,precision``) into names.

    Raises:
        InputError: no knob has this name; the message lists them.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",")]
    if unknown := [name for name in names if name not in KNOBS]:
        raise InputError(f"there is no knob {unknown[0]!r}; there are: {', '.join(KNOBS)}")
    return names
