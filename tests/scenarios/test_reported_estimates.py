"""Estimates for several GPUs: each has the answer that it has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import TensorDataset

import autobatch
from tests.support.probes import work

HEAD = 64
"""Width of a head that runs in flash attention on some GPUs only; on others, the plain formula runs."""


class Attention(nn.Module):
    """One head of attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 3 * HEAD)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.project(inputs).unflatten(-1, (3, 1, HEAD)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(query, key, value, dropout_p=0.1, enable_gqa=True)


def attention() -> autobatch.Workload:
    data = TensorDataset(torch.ones(64, 256, 16), torch.zeros(64, dtype=torch.int64))
    return work(Attention, train_data=data, loss=lambda model, batch: model(batch[0]).float().mean())


@pytest.mark.program
def test_the_answer_for_a_gpu_does_not_depend_on_the_others() -> None:
    def limits(*gpus: str) -> dict[str, tuple[int, int]]:
        options = {"memory_budget": "1GiB", "max_micro_batch": 4096, "precision": "bf16"}
        found = autobatch.estimate(attention(), profile=list(gpus), **options)
        return {one.profile: (one.micro_batch, one.peak_reserved_bytes) for one in found.estimates}

    gpus = ("a100-40gb", "t4")
    alone = limits(gpus[0]) | limits(gpus[1])
    assert alone[gpus[0]] != alone[gpus[1]], "the attention of these GPUs takes the same memory"
    assert limits(*gpus) == alone
