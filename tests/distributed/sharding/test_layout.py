"""The layout of a model over ranks, and the models that cannot have one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch import InputError
from autobatch.distributed.sharding.layout import check_sharding
from tests.support.step_workloads import Transformer


def test_blocks_are_sharded_by_default_and_a_pattern_chooses_others() -> None:
    model = Transformer()
    assert check_sharding(model, None) == list(model.blocks)
    assert check_sharding(model, r"blocks\.\d+\.mlp") == [model.blocks[1].mlp, model.blocks[0].mlp]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
        self.blocks[0][0].weight = self.head.weight  # type: ignore[index]


@pytest.mark.parametrize(
    ("model", "pattern", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), None, r"SyncBatchNorm \(1\)"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), None, "the sparse gradient of 0: use sparse=False"),
        (Tied(), None, "blocks.0.0.weight belongs to two of them"),
        (nn.ParameterDict({"scale": torch.tensor(2.6)}), None, "cannot split scale, .* give it the shape"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
            None,
            "0.bias is float32, and 1.bias is float64",
        ),
        (nn.Sequential(nn.Linear(2, 2)), "blocks", "--shard-modules blocks matches none of the 1 modules"),
        (nn.Linear(2, 2), "(", "is no regular expression"),
    ],
)
def test_what_cannot_be_sharded_is_named_in_one_line(
    model: nn.Module, pattern: str | None, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_sharding(model, pattern)
    assert "\n" not in str(caught.value)
