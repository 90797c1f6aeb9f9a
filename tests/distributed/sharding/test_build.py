"""Models that can be shared, their first weights, and the state of one process that ranks take over."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autobatch import InputError
from autobatch.distributed.sharding.build import on_meta, shard_over
from autobatch.distributed.sharding.layout import check_sharding
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.step_workloads import Transformer


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


def share(is_whole: bool) -> tuple[dict[str, list[float]], bool]:
    """Return the first weights of a shared model, and whether the tied ones are one."""
    group = open_group()
    if group.rank or not is_whole:
        with torch.device("meta"):
            model = built()
    else:
        model = built()
    torch.manual_seed(9)
    made, _ = shard_over(group, model, "fp32", torch.device("cpu"))
    found = {name: whole(tensor) for name, tensor in [*made.named_parameters(), *made.named_buffers()]}
    is_tied = made.first.weight is made.again.weight
    group.close()
    return found, is_tied


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.program)])
def test_the_first_weights_are_those_of_one_process(server: RankServer, world: int) -> None:
    model = built()
    expected = {name: whole(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert server.values(share, True, world=world) == [(expected, True)] * world


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.lock = (one for one in "a generator")  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"copy\.deepcopy can copy"):
        on_meta(model)


def test_blocks_are_gathered_one_at_a_time_in_any_container() -> None:
    model = Transformer()
    assert check_sharding(model) == list(model.blocks)


class TiedToBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
        self.blocks[0][0].weight = self.head.weight  # type: ignore[index]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), r"SyncBatchNorm \(1\)"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), "the sparse gradient of 0: use sparse=False"),
        (TiedToBlock(), "blocks.0.0.weight belongs to two of them"),
        (nn.ParameterDict({"scale": torch.tensor(2.6)}), "cannot split scale, .* give it the shape"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
            "0.bias is float32, and 1.bias is float64",
        ),
    ],
)
def test_what_cannot_be_sharded_is_named_in_one_line(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_sharding(model)
    assert "\n" not in str(caught.value)
