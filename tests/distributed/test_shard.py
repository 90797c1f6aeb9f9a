"""Models that can be shared, and their first weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autobatch import InputError
from autobatch.distributed.shard import blocks_of, check_sharding, on_meta, shard_over
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group


class Tied(nn.Module):
    """A model with tied weights, a buffer that no checkpoint keeps, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.again = nn.Linear(5, 7)
        self.again.weight = self.first.weight
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(7, 2)
        self.register_buffer("scale", torch.rand(3), persistent=False)


def built() -> nn.Module:
    torch.manual_seed(5)
    return Tied()


def whole(tensor: torch.Tensor) -> list[float]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().flatten().tolist()


def share() -> tuple[dict[str, list[float]], bool]:
    """Return the first weights of a shared model, and whether the tied ones are one."""
    group = open_group()
    with torch.device("meta" if group.rank else "cpu"):
        model = built()
    torch.manual_seed(9)
    made = shard_over(group, model, "fp32", torch.device("cpu")).model
    found = {name: whole(tensor) for name, tensor in [*made.named_parameters(), *made.named_buffers()]}
    is_tied = made.first.weight is made.again.weight
    group.close()
    return found, is_tied


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.program)])
def test_the_first_weights_are_those_of_one_process(server: RankServer, world: int) -> None:
    model = built()
    expected = {name: whole(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert server.values(share, world=world) == [(expected, True)] * world


def test_blocks_are_gathered_one_at_a_time_unless_they_share_a_parameter() -> None:
    model = Tied()
    assert blocks_of(model) == list(model.blocks)
    model.again = nn.Linear(7, 7)
    model.again.weight = model.blocks[1][0].weight  # type: ignore[index]
    assert blocks_of(model) == [model.blocks[0]]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), r"SyncBatchNorm \(1\)"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), r"BatchNorm1d \(1\) in bf16"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), "sparse gradient, of 0: use sparse=False"),
        (nn.ParameterDict({"scale": torch.tensor(2.6)}), "scale, a parameter without a dimension"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "bias is .*float32, 1.bias is .*float64"),
    ],
)
def test_what_cannot_be_sharded_is_named_in_one_line(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_sharding(model, "bf16")
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.lock = (one for one in "a generator")  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"copy\.deepcopy can copy"):
        on_meta(model)
