"""Estimates for one rank of many: what fits, how the plan counts ranks, and input that is refused."""

from __future__ import annotations

import multiprocessing

import pytest
import torch.distributed as dist
from torch import nn

from autobatch import InputError
from autobatch.estimates.estimator import estimate_limits
from tests.support.options import as_options
from tests.support.probes import WIDTH, work
from tests.support.training import INFO_NCE


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
    return nn.Sequential(nn.Linear(WIDTH, 256), *layers, nn.Linear(256, 4))


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


def test_a_loss_over_the_whole_batch_is_refused():
    with pytest.raises(InputError, match="trains in one process"):
        estimate(work(loss=INFO_NCE), target_batch=32, ranks=4)
