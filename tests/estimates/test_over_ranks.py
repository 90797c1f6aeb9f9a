"""Estimates for one rank of many: what fits, how the plan counts ranks, and input that is refused."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from autobatch import WholeBatchLoss
from autobatch.estimates.estimator import estimate_limits
from tests.support.options import as_options
from tests.support.probes import WIDTH as INPUTS
from tests.support.probes import work
from tests.support.step_workloads import TOKENS, Transformer, make

WIDTH = 128


def estimate(workload, **more):
    """Predict everything, with what would help."""
    given = {"profile": ["a100-40gb"], "memory_budget": "40MiB", **more}
    return estimate_limits(workload, as_options("estimate", **given))


def test_a_reason_is_said_once_for_all_gpus():
    found = estimate(work(), profile=["a100-40gb", "a100-80gb"], ranks="2", memory_budget="1GiB")
    (note,) = [note for note in found.notes if "--parallel" in note]
    assert note.startswith("a100-40gb and a100-80gb: a whole model fits on each rank")


def many_layers() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(40))
    return nn.Sequential(nn.Linear(INPUTS, 256), *layers, nn.Linear(256, 4))


@pytest.mark.program
def test_each_gpu_has_its_own_layout():
    """A whole model fits on the larger GPU only, whichever is named first."""
    before = multiprocessing.active_children()
    names = ["a100-40gb", "a100-80gb"]

    def found(*profile):
        given = {"memory_budget": "0.1%", "precision": "fp32", "ranks": 8}
        estimates = estimate(work(many_layers), profile=[*profile], **given).estimates
        return {one.profile: (one.parallel, one.world_size, one.micro_batch) for one in estimates}

    layouts = found(*names)
    assert [layouts[name][:2] for name in names] == [("shard", 8), ("replicate", 8)]
    assert all(size > 0 for _, _, size in layouts.values())
    assert found(*names[::-1]) == layouts
    assert not dist.is_initialized()
    assert set(multiprocessing.active_children()) <= set(before)


def contrastive():
    def info_nce(_, rows):
        return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    loss = WholeBatchLoss(represent=lambda model, batch: model(batch).mean(1), loss=info_nce)
    return make(lambda: Transformer(WIDTH, 1), train_data=TOKENS, loss=loss)


@pytest.mark.program
def test_a_loss_over_the_whole_batch_needs_whole_models_and_the_rows_of_all_ranks():
    found = estimate(contrastive(), target_batch=32, ranks=4)
    (one,) = found.estimates
    assert (one.parallel, one.plan.world_size, sum(one.plan.micro_batches)) == ("replicate", 4, 8)
    assert "the loss sees the whole batch" in one.parallel_reason
    assert "shard" not in [remedy.name for remedy in one.remedies]
    (alone,) = estimate(contrastive(), target_batch=32).estimates
    assert one.micro_batch == alone.micro_batch, "rows and losses are those of one GPU"
    exchanged = sum(p.numel() * 4 for p in contrastive().model().parameters())
    more = one.peak_allocated_bytes - alone.peak_allocated_bytes
    assert 0 <= more <= 1.1 * exchanged, "beside a buffer for the sum of the gradients"
