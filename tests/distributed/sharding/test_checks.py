"""Models that ranks cannot share are refused in one line that names what is in the way."""

from __future__ import annotations

import pytest
from torch import nn

from autobatch.core.errors import InputError
from autobatch.distributed.sharding.model import Sharding, shard

UNSHARDED = Sharding(mesh=None)  # type: ignore[arg-type]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
        self.blocks[0][0].weight = self.head.weight


def of_two_types():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight has none yet"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), r"SyncBatchNorm \(1\)"),
        (
            lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
            "the sparse gradient of 0: use sparse=False",
        ),
        (Tied, "blocks.0.0.weight belongs to two of them"),
        (of_two_types, "0.bias is float32, and 1.bias is float64"),
    ],
)
def test_what_cannot_be_sharded_is_named_in_one_line(model, message):
    with pytest.raises(InputError, match=message) as caught:
        shard(model(), UNSHARDED, "fp32")
    assert "\n" not in str(caught.value)
