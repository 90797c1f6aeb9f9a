"""The tuning context of a device and a workload."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from autobatch.core.knobs import applicable
from autobatch.device.cpu import CpuDevice
from tests.support.training import Rows
from tests.support.trials import context_of, setup_of, signed, simulated_gpu, trial_setup


def test_the_context_describes_the_workload_and_the_device() -> None:
    here = context_of(trial_setup())
    assert (here.blocks, here.images, here.micro_batch) == (6, False, 8)
    assert (here.gains_from_compile, here.reads_pinned_memory) == (False, False)
    assert here.optimizers == ("default", "foreach", "fused")
    assert here.precisions[0] == "fp32"
    made = trial_setup(
        model=lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
        train_data=Rows(torch.randn(8, 1, 4, 4), torch.randint(3, (8,))),
        optimizer=lambda params, lr: torch.optim.Adam(params, lr=lr, foreach=True),
    )
    there = context_of(made)
    assert (there.images, there.blocks, there.optimizers) == (True, 0, ("default",))
    assert context_of(made, is_precision_open=False).precisions == ("fp32",)


def test_expandable_segments_need_a_gpu_whose_segments_are_not_expandable_yet() -> None:
    home = Path()
    assert (
        CpuDevice(memory_budget="1GiB").why_not_expandable() == "only the allocator of a GPU keeps segments"
    )
    assert simulated_gpu(home, "1GiB").why_not_expandable() is None
    assert simulated_gpu(home, "1GiB").expandable().why_not_expandable() == "segments are expandable already"
    context = context_of(setup_of(signed(set()), simulated_gpu(home, "1GiB")))
    assert [axis.name for axis in applicable(context, ["expandable_segments"])[0]]
