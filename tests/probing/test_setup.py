"""Opening a bench: the device, the budget, the precision, and what an answer depends on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autobatch.core.errors import InputError
from autobatch.probing.setup import (
    SetupSettings,
    budget_of,
    build_model,
    describe_setup,
    find_workload,
    open_device,
    open_setup,
    precision_of,
)
from autobatch.workload.demo import MEMORY_BUDGET
from tests.probing.test_attempt import Vectors
from tests.support.probes import WIDTH, amsgrad, classify, mlp, vectors, work
from tests.support.untouched import fingerprint, with_gradients


@pytest.mark.parametrize(("spec", "kind"), [("cpu", "cpu"), ("sim:t4", "sim"), ("sim:l4", "sim")])
def test_devices_by_name(spec: str, kind: str) -> None:
    device = open_device(spec, memory_budget="64MiB", environ={})
    assert (device.kind, device.budget_bytes) == (kind, 64 * 2**20)
    assert device.describe().total_bytes > device.budget_bytes


@pytest.mark.parametrize("spec", ["gpu", "cpu:0", "cuda:x", "cuda:-1", "sim:", "sim", "", "tpu"])
def test_names_of_no_device(spec: str) -> None:
    with pytest.raises(InputError, match="names no device"):
        open_device(spec, memory_budget=None, environ={})


def test_a_function_in_place_of_its_workload_is_said() -> None:
    with pytest.raises(InputError, match=r"must be an autobatch.Workload, found a function: call it"):
        find_workload(work)
    with pytest.raises(InputError, match=r"must be an autobatch.Workload, found a int$"):
        find_workload(3)


def test_a_profile_that_is_not_there_and_a_budget_over_the_gpu() -> None:
    with pytest.raises(InputError, match="no-such-card"):
        open_device("sim:no-such-card", memory_budget=None, environ={})
    with pytest.raises(InputError, match="900"):
        open_device("sim:t4", memory_budget="900GiB", environ={})


def test_auto_is_the_host_where_there_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_device("auto", memory_budget="64MiB", environ={}).kind == "cpu"


def test_the_demo_brings_a_budget_and_an_asked_one_comes_before_it() -> None:
    assert budget_of(SetupSettings(device="cpu"), is_demo=True) == MEMORY_BUDGET["cpu"]
    assert budget_of(SetupSettings(device="sim:t4"), is_demo=True) == MEMORY_BUDGET["sim"]
    assert budget_of(SetupSettings(device="cpu", memory_budget="9MiB"), is_demo=True) == "9MiB"
    assert budget_of(SetupSettings(device="cpu"), is_demo=False) is None


def test_bf16_only_on_gpus_that_are_built_for_it(monkeypatch) -> None:
    gpu = SimpleNamespace(kind="cuda", torch_device="cuda:0")
    for capability, precision in (((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert precision_of(SetupSettings(), gpu) == precision
        assert precision_of(SetupSettings(precision="fp16"), gpu) == "fp16"
    assert precision_of(SetupSettings(), open_device("cpu", memory_budget="1MiB", environ={})) == "fp32"


@pytest.mark.parametrize("made", [None, nn.Linear, torch.zeros(3)])
def test_what_is_no_model(made) -> None:
    with pytest.raises(InputError, match=r"Workload\(model=…\) returned"):
        build_model(work(lambda: made))


def test_opening_and_describing_draws_nothing_though_model_and_data_do() -> None:
    live = with_gradients(mlp())

    def model() -> nn.Module:
        torch.rand(7)
        return live

    before = fingerprint(live)
    setup = open_setup(work(model, train_data=Vectors()), SetupSettings(device="cpu", memory_budget="1MiB"))
    describe_setup(setup)
    assert fingerprint(live) == before


def test_the_seed_decides_the_weights() -> None:
    def weight(seed: int) -> torch.Tensor:
        return next(open_setup(work(), SetupSettings(device="cpu", seed=seed)).model.parameters())

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


# What an answer depends on.


def key_of(workload=None, **options) -> dict:
    asked = {"device": "cpu", "memory_budget": "1MiB"} | options
    return describe_setup(open_setup(workload or work(), SetupSettings(**asked))).key


class Renamed(nn.Sequential):
    """The same parameters in another class."""


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def other_loss(model: nn.Module, batch) -> torch.Tensor:
    return classify(model, batch)


@pytest.mark.parametrize(
    ("field", "workload", "options"),
    [
        ("model", work(lambda: mlp(65)), {}),
        ("model", work(frozen), {}),
        ("model", work(lambda: Renamed(*mlp())), {}),
        ("model", work(lambda: mlp().double()), {}),
        ("optimizer", work(optimizer=amsgrad), {}),
        ("optimizer", work(optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False)), {}),
        ("samples", work(train_data=vectors(width=WIDTH + 1)), {}),
        ("samples", work(train_data=TensorDataset(torch.zeros(9, WIDTH), torch.zeros(9))), {}),
        ("loss", work(loss=other_loss), {}),
        ("precision", work(), {"precision": "bf16"}),
        ("budget_bytes", work(), {"memory_budget": "2MiB"}),
        ("max_grad_norm", work(), {"max_grad_norm": 1.0}),
        ("ema", work(), {"ema": 0.9}),
        ("workload", work(name="another"), {}),
    ],
)
def test_a_field_of_the_key_for_all_that_changes_the_answer(field: str, workload, options: dict) -> None:
    before, after = key_of(), key_of(workload, **options)
    assert {name for name in before if before[name] != after[name]} == {field}


def test_what_does_not_change_the_answer_is_in_no_key() -> None:
    before = key_of()
    assert key_of(work(learning_rate=0.5), seed=4) | {"optimizer": before["optimizer"]} == before
    assert key_of(work(train_data=vectors(700))) == before


def test_facts_tell_what_a_plan_needs() -> None:
    setup = open_setup(work(base_batch=32), SetupSettings(device="cpu", memory_budget="1MiB", target_batch=9))
    facts = describe_setup(setup)
    assert (facts.samples, facts.base_batch, facts.precision) == (600, 32, "fp32")
    assert facts.device.budget_bytes == 2**20
