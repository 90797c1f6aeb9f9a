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
from tests.support.step_workloads import TOKENS, Transformer, make, transformer

WIDTH = 128


def workload(depth: int = 3):
    return transformer(width=WIDTH, depth=depth)


def settings_of(budget, target_batch=None, ranks=None, **more):
    given = {"profile": ["a100-40gb"], "memory_budget": budget, "target_batch": target_batch, "ranks": ranks}
    return as_options("estimate", **{**given, **more})


def estimate(what=None, *, ranks=4, budget="40MiB", target_batch=None, **more):
    """Predict everything, with the table and what would help."""
    options = settings_of(budget, target_batch, ranks, **more)
    return estimate_limits(what or workload(), options)


def limit(what=None, *, ranks=4, budget="40MiB", target_batch=None, **more):
    """Predict for two GPUs of one budget, so that no changes are traced, and return the first answer."""
    options = settings_of(budget, target_batch, ranks, profile=["a100-40gb", "a100-80gb"], **more)
    found = estimate_limits(what or workload(), options)
    return found.estimates[0], found.notes


@pytest.mark.program
def test_a_rank_holds_its_part_and_gathers_layers():
    one, notes = limit(parallel="shard", target_batch=64)
    elements = sum(p.numel() for p in workload().model().parameters())
    assert one.fits
    # Rows that do not divide by 4 are padded, so a part may be a little more than a fourth.
    assert elements <= one.memory["parameters"] <= 1.02 * elements
    assert one.memory["optimizer state"] <= 2.05 * elements
    assert (one.world_size, one.parallel) == (4, "shard")
    assert one.plan.world_size == 4
    assert sum(one.plan.micro_batches) * 4 == 64
    assert not any("NCCL" in note for note in notes)


def many_layers() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(40))
    return nn.Sequential(nn.Linear(INPUTS, 256), *layers, nn.Linear(256, 4))


@pytest.mark.program
def test_the_table_has_all_ranks_and_gpus_each_with_its_own_layout():
    """A whole model fits on the larger GPU only, whichever is named first."""
    before = multiprocessing.active_children()
    names = ["a100-40gb", "a100-80gb"]
    given = {"what": work(many_layers), "budget": "0.1%", "precision": "fp32", "ranks": "4,8"}

    def cells(*profile):
        found = estimate(profile=[*profile], **given)
        layouts = {one.profile: one.parallel for one in found.estimates}
        return layouts, {
            (one.profile, one.world_size): (one.parallel, one.micro_batch) for one in found.over_ranks
        }

    layouts, table = cells(*names)
    assert layouts == dict(zip(names, ["shard", "replicate"], strict=True))
    assert {key: parallel for key, (parallel, _) in table.items()} == {
        (name, world): layouts[name] for name in names for world in (4, 8)
    }
    assert all(size > 0 for _, size in table.values())
    assert cells(*names[::-1]) == (layouts, table)
    assert not dist.is_initialized()
    assert set(multiprocessing.active_children()) <= set(before)


def contrastive():
    def info_nce(_, rows):
        return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    loss = WholeBatchLoss(represent=lambda model, batch: model(batch).mean(1), loss=info_nce)
    return make(lambda: Transformer(WIDTH, 1), train_data=TOKENS, loss=loss)


@pytest.mark.program
def test_a_loss_over_the_whole_batch_needs_whole_models_and_the_rows_of_all_ranks():
    found = estimate(contrastive(), target_batch=32)
    (one,) = found.estimates
    assert (one.parallel, one.plan.world_size, sum(one.plan.micro_batches)) == ("replicate", 4, 8)
    assert "the loss sees the whole batch" in one.parallel_reason
    assert {row.world_size for row in found.over_ranks} == {4}
    assert "shard" not in [remedy.name for remedy in one.remedies]
    (alone,) = estimate_limits(contrastive(), settings_of("40MiB", 32)).estimates
    assert one.micro_batch == alone.micro_batch, "rows and losses are those of one GPU"
    exchanged = sum(p.numel() * 4 for p in contrastive().model().parameters())
    more = one.peak_allocated_bytes - alone.peak_allocated_bytes
    assert 0 <= more <= 1.1 * exchanged, "beside a buffer for the sum of the gradients"
