"""The trained weights as safetensors, and a check before the first step that they can be written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autobatch.core.errors import CheckpointError, InputError
from autobatch.core.files import replaced_file
from autobatch.distributed.engine import Whole
from autobatch.rehearsal.setup import Setup
from autobatch.step.train_state import TrainState
from autobatch.training.run_folder import AVERAGED_WEIGHTS, WEIGHTS
from autobatch.workload.contract import kind_of

METADATA = {"format": "pt"}
"""Written into every file; transformers reads only files whose format it knows. A second entry would make the
bytes of a file differ from run to run, because safetensors writes them in any order."""


def export_weights(train_state: TrainState, folder: Path, engine: Whole | None = None) -> None:
    """Write the weights as safetensors, and their averages if there are any.

    All ranks call it, and rank 0 writes. Of tied weights a file has one, and its metadata name the others
    (`safetensors.torch.save_model`).

    Raises:
        CheckpointError: a file cannot be written.
    """
    engine = engine or Whole()
    _export(train_state.model, folder / WEIGHTS, engine)
    if train_state.average is not None:
        with train_state.averaged():
            _export(train_state.model, folder / AVERAGED_WEIGHTS, engine)


def check_exportable(owner: Setup | TrainState) -> None:
    """Check before the first step that the model's weights can be written to a safetensors file at the end.

    Raises:
        InputError: a tensor cannot be written; the message names it.
    """
    for name, value in owner.model.state_dict().items():
        if not isinstance(value, Tensor):
            reason = kind_of(value)
        elif value.layout is not torch.strided or not _can_be_written(value.dtype):
            reason = f"a tensor of {value.dtype} in the layout {value.layout}"
        else:
            continue
        raise InputError(
            f"the weights cannot be saved at the end of a run: {name} is {reason}, which safetensors cannot "
            "hold. Keep it in another type, or out of the state dict (persistent=False)"
        )


@cache
def _can_be_written(dtype: torch.dtype) -> bool:
    from safetensors.torch import save

    try:
        return bool(save({"tensor": torch.zeros(1, dtype=dtype, device="cpu")}))
    except Exception:  # of many kinds, for example KeyError and safetensors' own
        return False


def _export(model: nn.Module, path: Path, engine: Whole) -> None:
    """Write one file on rank 0, with whole tensors."""
    weights = engine.whole_weights(model)
    engine.ranks.once(lambda: _write(weights, path))


def _write(weights: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_model

    # Names are those before ``torch.compile``. Of a part of another tensor, not tied to it, a copy.
    own = {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): (
            value if value.nbytes == value.untyped_storage().nbytes() else value.clone()
        )
        for name, value in sorted(weights.items())
    }
    model: Any = SimpleNamespace(state_dict=lambda: dict(own))  # all that is asked of a model
    try:
        with replaced_file(path) as temporary:
            save_model(model, str(temporary), {**METADATA})  # it adds the names of tied weights
    except Exception as error:  # safetensors has errors of its own for a full disk
        raise CheckpointError(
            f"the weights could not be written to {path}: {error}. The checkpoints hold them too"
        ) from error
