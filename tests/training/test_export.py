"""The exported weights: what is written, and what is known before to be impossible to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from autobatch import InputError, Progress, fit
from autobatch.training.export import export_weights
from autobatch.training.run import train
from tests.support.probes import Listener
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.runs import open_loop, settings
from tests.support.sharded_loops import Blocks, block_workload, sharded_loop, step_together
from tests.support.training import apart, make_loop, make_workload, weights


class Tied(nn.Module):
    """Model whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(ids))


def test_exported_weights_load_into_the_model_and_tied_ones_are_stored_once(tmp_path: Path) -> None:
    train_state = make_loop(make_workload(model=Tied)).train_state
    export_weights(train_state, tmp_path)
    assert len(load_file(tmp_path / "model.safetensors")) == 1
    other = Tied()
    load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(other.output.weight, train_state.model.output.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


class Holder(nn.Module):
    """A model that has the given tensors too."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3).double()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


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
    ("model", "message"),
    [
        (lambda: Holder({"a": torch.eye(3).to_sparse()}), "a is .* in the layout torch.sparse_coo"),
        (lambda: Extra({}), "_extra_state is a dict, which safetensors cannot hold"),
    ],
)
def test_weights_that_cannot_be_exported_are_known_before_the_first_attempt(
    model, message: str, tmp_path: Path
) -> None:
    heard = Listener()
    options = {"target_batch": 6, "steps": 3, "device": "cpu", "trials": 0, "progress": heard}
    with pytest.raises(InputError, match=message):
        fit(make_workload(model=model), out=tmp_path / "run", **options)
    assert heard.sizes == []


def test_weights_that_pass_the_check_are_exported(tmp_path: Path) -> None:
    loop = open_loop(make_workload(model=lambda: Holder(CAN)))
    train(loop, settings(tmp_path), Progress())
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == {*CAN, "body.weight", "body.bias"}
    assert all(torch.equal(found[name], value) for name, value in CAN.items())


def export_shards(folder: Path) -> None:
    group = open_group()
    loop = sharded_loop(group, block_workload(), ema=0.9)
    step_together(loop, 2)
    export_weights(loop.train_state, folder, loop.engine)
    group.close()


@pytest.mark.distributed
def test_ranks_that_share_a_model_export_whole_weights(server: RankServer, tmp_path: Path) -> None:
    server.values(export_shards, tmp_path, world=4)  # the head has 3 rows
    loop = make_loop(block_workload(), ema=0.9)
    step_together(loop, 2)
    found = Blocks().double()
    load_model(found, str(tmp_path / "model.safetensors"))
    assert apart(weights(found), weights(loop.train_state.model)) <= 1e-12
    load_model(found, str(tmp_path / "model-ema.safetensors"))
    with loop.train_state.averaged():
        assert apart(weights(found), weights(loop.train_state.model)) <= 1e-12
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["mix_again.weight"] == "mix.weight"
        assert "mix_again.weight" not in file.keys()  # noqa: SIM118 - it is no mapping
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["model.safetensors", "model-ema.safetensors"]
    )
