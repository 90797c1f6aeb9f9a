"""What a plan says about a model that writes in its forward pass, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobatch
from autobatch.core.errors import InputError
from tests.support.probes import WIDTH, Listener, work


class Queued(nn.Module):
    """A model that keeps its last outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("queue", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(x)
        self.queue.copy_(outputs.detach().mean(0))
        return outputs


@pytest.mark.parametrize(("target_batch", "notes"), [(40, 1), (10, 0)])
def test_a_plan_names_what_each_micro_batch_writes(target_batch: int, notes: int) -> None:
    heard = Listener()
    options: dict[str, Any] = {"device": "cpu", "memory_budget": "1MiB", "max_micro_batch": 10}
    autobatch.plan(work(Queued), target_batch=target_batch, progress=heard, **options)
    assert sum("writes the buffer queue: each of the 4 micro-batches" in one for one in heard.notes) == notes


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"^0\.weight of the model has no shape before"):
        autobatch.plan(work(lambda: nn.Sequential(nn.LazyLinear(4))), target_batch=8, device="cpu")
