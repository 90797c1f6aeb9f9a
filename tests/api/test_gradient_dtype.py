"""The type of gradient sums from the option to the plan, the loop and a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import autobatch

OPTIONS = {"device": "cpu", "precision": "fp32", "trials": 0, "progress": False, "checkpoint_every": 1}


def workload() -> autobatch.Workload:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 40), torch.randint(0, 4, (96,)))
    return autobatch.Workload(
        model=lambda: nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 4)).bfloat16(),
        train_data=data,
        loss=lambda model, batch: cross_entropy(model(batch[0].bfloat16()).float(), batch[1]),
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
        learning_rate=0.1,
    )


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("device", ["cpu", "sim:t4"])
def test_the_limit_is_predicted_for_either_type_and_is_larger_for_that_of_the_weights(device):
    options = {"device": device, "precision": "fp32", "progress": False}
    peaks = {}
    for dtype in ("fp32", "weights"):
        one = autobatch.probe(workload(), micro_batch=2, gradient_dtype=dtype, **options).attempts[0]
        peaks[dtype] = one.peak_allocated_bytes
    # The sums of a linear layer's weights alone are 24,000 bytes more.
    assert peaks["fp32"] - peaks["weights"] >= 2 * 300 * 40
    if device == "cpu":
        budget = 3 * peaks["fp32"]
        found = {
            dtype: autobatch.probe(workload(), memory_budget=budget, gradient_dtype=dtype, **options)
            for dtype in peaks
        }
        for one in found.values():
            assert one.predicted_micro_batch == one.micro_batch
            assert one.oom_count == 0
        assert found["weights"].micro_batch >= found["fp32"].micro_batch


def test_the_plan_carries_the_type_into_a_loop_of_the_users(tmp_path):
    grads = {}
    for dtype in ("auto", "weights"):
        plan = autobatch.plan(
            workload(), target_batch=96, max_micro_batch=1, gradient_dtype=dtype, device="cpu"
        )
        assert plan.gradient_dtype == ("weights" if dtype == "weights" else "fp32")
        assert f'"gradient_dtype":"{plan.gradient_dtype}"' in autobatch_json(plan)
        one = workload()
        model = one.model()
        optimizer = one.optimizer(model.parameters(), 0.0)
        [batch] = autobatch.batches(one.train_data, plan, optimizer=optimizer, steps=1)
        for micro in batch:
            batch.backward(one.loss(model, micro.data))
        grads[plan.gradient_dtype] = model[0].weight.grad
        batch.step(optimizer)
    assert grads["fp32"] is None
    assert grads["weights"].dtype == torch.bfloat16


def autobatch_json(plan: autobatch.Plan) -> str:
    import msgspec

    return msgspec.json.encode(plan).decode()


def test_a_resume_with_another_type_plans_anew(tmp_path):
    out = tmp_path / "run"
    common = {**OPTIONS, "target_batch": 32, "out": out, "max_micro_batch": 4}
    first = autobatch.fit(workload(), steps=1, gradient_dtype="weights", **common)
    assert first.plan.gradient_dtype == "weights"
    again = autobatch.fit(workload(), steps=2, gradient_dtype="weights", resume=True, **common)
    assert again.plan.gradient_dtype == "weights"
    other = autobatch.fit(workload(), steps=3, resume=True, **common)
    assert other.plan.gradient_dtype == "fp32"
    assert other.training.optimizer_steps == 3
