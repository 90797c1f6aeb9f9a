"""Runs that loader workers feed: the same weights as without them, whatever happens on the way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.support.feeds import fed_loop
from tests.support.kinds import stateful
from tests.support.training import INFO_NCE, fingerprint, network


def refuse(_: nn.Module, given: tuple[Tensor]) -> None:
    """Hold two samples as a GPU may."""
    if len(given[0]) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def limited() -> nn.Module:
    model = network(torch.float32)
    model.register_forward_pre_hook(refuse)
    return model


def noisy(samples: Any) -> Any:
    """Draw beside the samples, seeded by the first of a micro-batch."""
    inputs, *others = default_collate(samples)
    return inputs + torch.randn(()) + random.random(), *others


@pytest.mark.parametrize("fields", [{"collate": noisy}, {"loss": INFO_NCE}])
def test_workers_that_start_again_whenever_memory_runs_out_feed_what_a_run_without_them_has(
    fields: dict[str, Any],
) -> None:
    workload = stateful(model=limited, **fields)
    with fed_loop(workload, workers=2, micro_batch=7) as loop:
        records = list(loop.run())
        smaller = fingerprint(loop.train_state.model)
    assert [record.micro_batch for record in records] == [2] * 6
    assert loop.oom_recoveries == 2
    with fed_loop(workload, workers=0, sample_seeds=True, micro_batch=2) as loop:
        list(loop.run())
        assert fingerprint(loop.train_state.model) == smaller
