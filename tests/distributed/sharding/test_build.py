"""A shared model begins with the weights of one process, or draws its parts if it is never whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autobatch import InputError
from autobatch.distributed.sharding.build import on_meta, shard_over
from autobatch.distributed.sharding.layout import ShardLayout
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


def share(is_whole: bool) -> tuple[dict[str, list[float]], bool]:
    """Return the first weights of a shared model, and whether the tied ones are one."""
    group = open_group()
    if group.rank or not is_whole:
        with torch.device("meta"):
            model = built()
    else:
        model = built()
    torch.manual_seed(9)
    layout = ShardLayout(world=group.world)
    made, _ = shard_over(group, layout, model, "fp32", torch.device("cpu"))
    found = {name: whole(tensor) for name, tensor in [*made.named_parameters(), *made.named_buffers()]}
    is_tied = made.first.weight is made.again.weight
    group.close()
    return found, is_tied


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_the_first_weights_are_those_of_one_process(server: RankServer, world: int) -> None:
    model = built()
    expected = {name: whole(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert server.values(share, True, world=world) == [(expected, True)] * world


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)])


def draw() -> list[float]:
    group = open_group()
    with torch.device("meta"):
        model = Drawn()
    torch.manual_seed(9)
    made, _ = shard_over(group, ShardLayout(world=group.world), model, "fp32", torch.device("cpu"))
    found = whole(made.blocks[0][0].weight)  # type: ignore[index]
    group.close()
    return found


@pytest.mark.distributed
def test_a_model_that_is_never_whole_draws_other_numbers_on_each_rank(server: RankServer) -> None:
    found = server.values(draw)
    assert found[0] == found[1]
    weights = torch.tensor(found[0]).view(64, 64)
    # nn.Linear draws between -1 ÷ √64 and 1 ÷ √64.
    assert weights.abs().max() <= 1 / 8
    assert weights.std() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert not torch.equal(weights[:32], weights[32:])


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.lock = (one for one in "a generator")  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"copy\.deepcopy can copy"):
        on_meta(model)
