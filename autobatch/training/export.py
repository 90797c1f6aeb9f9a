"""The trained weights as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from autobatch.core.errors import CheckpointError
from autobatch.core.files import AVERAGED_WEIGHTS, WEIGHTS, replaced_file
from autobatch.core.text import error_text
from autobatch.distributed.engine import Whole
from autobatch.step.train_state import TrainState

METADATA = {"format": "pt"}
"""Written into every file; transformers reads only files whose format it knows. A second entry would make the
bytes of a file differ from run to run, because safetensors writes them in any order."""


def export_weights(train_state: TrainState, folder: Path, engine: Whole) -> None:
    """Write the weights as safetensors, and their averages if there are any.

    All ranks call it, and rank 0 writes. Of tied weights a file has one, and its metadata name the others
    (`safetensors.torch.save_model`).

    Raises:
        CheckpointError: a file cannot be written, or safetensors cannot hold a part of the state dict.
    """
    _export(train_state.model, folder / WEIGHTS, engine)
    if train_state.average is not None:
        with train_state.averaged():
            _export(train_state.model, folder / AVERAGED_WEIGHTS, engine)


def _export(model: nn.Module, path: Path, engine: Whole) -> None:
    """Write one file on rank 0, with whole tensors."""
    weights = engine.whole_weights(model)
    engine.ranks.once(lambda: _write(weights, path))


def _write(weights: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_model

    try:
        # Names are those before ``torch.compile``. Of a part of another tensor, not tied to it, a copy.
        own = {
            ".".join(part for part in name.split(".") if part != "_orig_mod"): (
                value if value.nbytes == value.untyped_storage().nbytes() else value.clone()
            )
            for name, value in sorted(weights.items())
        }
        model: Any = SimpleNamespace(state_dict=lambda: dict(own))  # all that is asked of a model
        with replaced_file(path) as temporary:
            save_model(model, str(temporary), {**METADATA})  # it adds the names of tied weights
    except Exception as error:  # of many kinds, for a full disk and for what safetensors cannot hold
        reason = f"{type(error).__name__}: {error_text(error, first_line=True)}".rstrip(".")
        raise CheckpointError(
            f"the weights could not be written to {path} ({reason}). The checkpoints hold them too"
        ) from error
