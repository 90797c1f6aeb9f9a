"""The exported weights: what is written, and what is told if they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from autobatch import CheckpointError
from autobatch.cli.output import describe_failure
from autobatch.training.checkpoint import load_newest
from tests.support.runs import open_loop, settings, train
from tests.support.training import make_workload, weights


class Holder(nn.Module):
    """A model that has the given tensors too, and a layer with the weight of another."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.body, self.tied = (nn.Linear(5, 3).double() for _ in range(2))
        self.tied.weight = self.body.weight
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) + self.tied(inputs)


class Extra(Holder):
    """A model whose state dict has another object."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


WHOLE = torch.arange(8.0)
CAN = {
    "of_bfloat16": torch.zeros(2, dtype=torch.bfloat16),
    "of_bool": torch.zeros(2, dtype=torch.bool),
    "whole": WHOLE,
    "part": WHOLE[3:],
    "expanded": torch.ones(1).expand(5),
    "empty": torch.zeros(0),
    "transposed": torch.zeros(2, 3).t(),
}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Holder({"a": torch.eye(3).to_sparse()}), "RuntimeError: nbytes is not defined for sparse"),
        (lambda: Extra({}), "AttributeError: 'dict' object"),
    ],
)
def test_weights_that_cannot_be_exported_are_in_the_last_checkpoint(
    model, reason: str, tmp_path: Path
) -> None:
    loop = open_loop(make_workload(model=model))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors \({reason}.*hold them too") as caught:
        train(loop, settings(tmp_path))
    assert describe_failure(caught.value)[:2] == (str(caught.value), 1)
    saved = load_newest(tmp_path / "checkpoints").state["model"]
    assert torch.equal(saved["body.weight"], loop.train_state.model.body.weight)


def test_weights_are_exported(tmp_path: Path) -> None:
    loop, file = open_loop(make_workload(model=lambda: Holder(CAN))), tmp_path / "model.safetensors"
    train(loop, settings(tmp_path))
    found = load_file(file)
    assert set(found) == {*CAN, "body.weight", "body.bias", "tied.bias"}, "tied weights are stored once"
    assert all(torch.equal(found[name], value) for name, value in CAN.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "tied.weight": "body.weight"}
    loaded = Holder({name: torch.ones_like(value) for name, value in CAN.items()})
    load_model(loaded, str(file))
    assert torch.equal(weights(loaded), weights(loop.train_state.model))
    train(open_loop(), settings(tmp_path / "next"))
    with safe_open(tmp_path / "next" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "that of another model"
