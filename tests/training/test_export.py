"""The exported weights: what is written, and what is known before to be impossible to write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from autobatch import CheckpointError, InputError, __version__
from autobatch.training.export import check_exportable, export_weights
from tests.support.probes import Listener
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
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


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_exported_weights_honour_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        export_weights(make_loop(make_workload()).train_state, tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode


def test_weights_that_cannot_be_written_are_named_and_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"could not be written to .*model\.safetensors"):
        export_weights(make_loop(make_workload()).train_state, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


class Holder(nn.Module):
    """A model whose state dict holds the given tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


WHOLE = torch.arange(8.0)
CANNOT = {
    "complex128": ({"a": torch.zeros(2, dtype=torch.complex128)}, "a is of type complex128"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "a is a tensor in the layout sparse_coo"),
}
CAN = {
    "types": {
        f"of_{str(dtype).removeprefix('torch.')}": torch.zeros(2, dtype=dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64)
    },
    "parts": {"a": WHOLE[:5], "b": WHOLE[3:]},
    "one part": {"a": WHOLE[2:4]},
    "expanded": {"a": torch.ones(1).expand(5), "b": torch.zeros(1).expand(2, 3)},
    "one whole and parts that do not meet": {"a": WHOLE, "b": WHOLE[1:2], "c": WHOLE[3:5]},
    "one whole among parts": {"a": WHOLE, "b": WHOLE[3:]},
    "empty": {"a": torch.zeros(0), "b": torch.zeros(0)},
    "transposed": {"a": torch.zeros(2, 3).t()},
}


@pytest.mark.parametrize("kind", CANNOT)
def test_weights_that_cannot_be_exported_are_known_before(kind: str, tmp_path: Path) -> None:
    tensors, message = CANNOT[kind]
    loop = make_loop(make_workload())
    loop.train_state.model = Holder(**tensors)
    with pytest.raises(InputError, match=message):
        check_exportable(loop.train_state.model)
    with pytest.raises(Exception):  # noqa: B017, PT011 - safetensors raises many kinds
        export_weights(loop.train_state, tmp_path)


@pytest.mark.parametrize("kind", CAN)
def test_weights_that_pass_the_check_are_exported(kind: str, tmp_path: Path) -> None:
    loop = make_loop(make_workload())
    loop.train_state.model = Holder(**CAN[kind])
    check_exportable(loop.train_state.model)
    export_weights(loop.train_state, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found
    assert all(torch.equal(found[name], CAN[kind][name]) for name in found)
    assert set(found) == set(CAN[kind])


def test_a_state_dict_with_other_objects_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    with pytest.raises(InputError, match="_extra_state is a dict, which safetensors cannot hold"):
        check_exportable(Extra(1, 1))


def test_a_run_ends_before_its_first_attempt(tmp_path: Path) -> None:
    import autobatch

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x[:, :2]).abs().sum(dim=1)

    workload = make_workload(model=Complex, loss=lambda model, batch: model(batch[0]).mean())
    heard = Listener()
    with pytest.raises(InputError, match="weight is of type complex128"):
        autobatch.fit(
            workload, target_batch=6, steps=3, device="cpu", trials=0, out=tmp_path / "run", progress=heard
        )
    assert heard.sizes == []
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_equal_weights_are_equal_files(tmp_path: Path) -> None:
    train_state = make_loop(make_workload(model=Tied)).train_state
    contents = set()
    for _ in range(12):
        export_weights(train_state, tmp_path)
        contents.add((tmp_path / "model.safetensors").read_bytes())
    assert len(contents) == 1
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata().items() > {"format": "pt", "autobatch": __version__}.items()


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
