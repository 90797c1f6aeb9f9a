"""Estimates for one GPU: sizes, explanations, and what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autobatch
from autobatch import DoesNotFitError
from autobatch.estimates.estimator import estimate_limits
from autobatch.estimates.traced_step import Unpredictable
from tests.support.options import as_options
from tests.support.probes import WIDTH, mlp, work
from tests.support.step_workloads import WORKLOADS


@pytest.mark.program
def test_an_estimate_is_not_capped_by_the_data_and_says_which_option_caps_it():
    """The data have 64 samples, and all GPUs would take them in one micro-batch."""

    def estimated(**options):
        asked = as_options("estimate", profile=["l40s", "a100-80gb"], memory_budget="1%", **options)
        return estimate_limits(WORKLOADS["perceptron"](), asked)

    free = estimated()
    small, large = (one.micro_batch for one in free.estimates)
    assert 64 < small < large
    assert not any("bounds" in note for note in free.notes)
    capped = estimated(target_batch=small + 1)
    assert [one.micro_batch for one in capped.estimates] == [small, small + 1]
    assert any("--target-batch" in note and "on a100-80gb:" in note for note in capped.notes)


def test_a_step_that_insists_on_even_micro_batches_is_estimated_in_them():
    workload = work(lambda: mlp(2048))
    loss = workload.loss

    def even_loss(model, batch):
        assert len(batch[0]) % 2 == 0
        return loss(model, batch)

    def estimated(workload, **more):
        options = as_options("estimate", profile=["t4"], memory_budget="26MiB", precision="fp32", **more)
        return estimate_limits(workload, options).estimates[0]

    even = replace(workload, loss=even_loss)
    with pytest.raises(Unpredictable, match=r"give --micro-batch-multiple.* probe --device sim:t4 runs"):
        estimated(even)
    one, free = estimated(even, target_batch=500, micro_batch_multiple=2), estimated(workload)
    assert one.micro_batch == free.micro_batch // 2 * 2 > 0
    assert one.micro_batch_low <= one.micro_batch <= one.micro_batch_high < 500
    assert (sum(one.plan.micro_batches), one.plan.precision) == (500, "fp32")
    assert max(one.plan.micro_batches) <= one.micro_batch
    assert all(size % 2 == 0 for size in one.plan.micro_batches)


def test_a_model_that_needs_values_and_more_memory_than_there_is_is_refused_in_one_line():
    def too_large() -> nn.Module:
        model = mlp()
        float(model[0].weight.sum())
        model.register_parameter("large", nn.Parameter(torch.empty(10**15)))
        return model

    with pytest.raises(DoesNotFitError, match=r"out of memory while the model was built") as caught:
        autobatch.estimate(work(too_large), profile=["t4"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_still", [False, True])
def test_a_part_in_eval_mode_is_predicted_so(is_still: bool) -> None:
    """Dropout keeps a mask of a byte per number only where it draws one."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 1 << 16), nn.Dropout(0.5).train(not is_still), nn.Linear(1 << 16, 4)
        )

    options = as_options("estimate", profile=["t4"], micro_batch=64, precision="fp32")
    (found,) = estimate_limits(work(build), options).estimates
    bytes_each = 4 if is_still else 5
    assert found.memory["activations"] == pytest.approx(64 * (1 << 16) * bytes_each, rel=0.02)
