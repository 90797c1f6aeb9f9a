"""The weights at the end of a run, in a format that anything can load and nothing can execute."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from autobatch.errors import CheckpointError
from autobatch.trainee import Trainee

WEIGHTS = "model.safetensors"
AVERAGED_WEIGHTS = "model-ema.safetensors"
"""The averages in place of the weights; buffers as they are."""


def export_weights(trainee: Trainee, folder: Path) -> None:
    """Write the weights, and their averages where any are kept, as safetensors.

    Raises:
        CheckpointError: a file cannot be written.
    """
    _export(trainee.model, folder / WEIGHTS)
    if trainee.average is not None:
        with trainee.average.swapped_in():
            _export(trainee.model, folder / AVERAGED_WEIGHTS)


def _export(model: nn.Module, path: Path) -> None:
    """Write one file, whole or not at all; parameters that are tied are stored once."""
    from safetensors.torch import save_model

    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        save_model(model, str(temporary))
        temporary.chmod(0o644)  # it is made for its owner's eyes alone
        temporary.replace(path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise CheckpointError(
                f"the weights could not be written to {path}: {error}; the checkpoints hold them all the same"
            ) from error
        raise
