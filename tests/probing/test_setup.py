"""Opening a bench: the device, the budget, the precision, and what an answer depends on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autobatch.core.errors import InputError
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.probing.setup import (
    SetupSettings,
    budget_of,
    build_model,
    describe_setup,
    find_workload,
    new_allocator,
    open_setup,
    precision_of,
)
from autobatch.workload.demo import MEMORY_BUDGET
from tests.probing.test_attempt import Vectors
from tests.support.probes import WIDTH, amsgrad, classify, mlp, vectors, work
from tests.support.untouched import fingerprint, with_gradients


def test_a_function_in_place_of_its_workload_is_said() -> None:
    with pytest.raises(InputError, match=r"must be an autobatch.Workload, found a function: call it"):
        find_workload(work)
    with pytest.raises(InputError, match=r"must be an autobatch.Workload, found an int$"):
        find_workload(3)


def test_the_demo_brings_a_budget_and_an_asked_one_comes_before_it() -> None:
    assert budget_of(SetupSettings(device="cpu"), is_demo=True) == MEMORY_BUDGET["cpu"]
    assert budget_of(SetupSettings(device="sim:t4"), is_demo=True) == MEMORY_BUDGET["sim"]
    assert budget_of(SetupSettings(device="cpu", memory_budget="9MiB"), is_demo=True) == "9MiB"
    assert budget_of(SetupSettings(device="cpu"), is_demo=False) is None


def test_the_demo_asks_for_the_budget_of_the_device_that_auto_finds(monkeypatch) -> None:
    for found, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert budget_of(SetupSettings(device="auto"), is_demo=True) == MEMORY_BUDGET[kind]


def test_the_device_chooses_the_precision_unless_one_is_asked_for() -> None:
    device = SimpleNamespace(default_precision=lambda: "bf16")
    assert precision_of(SetupSettings(), device) == "bf16"
    assert precision_of(SetupSettings(precision="fp16"), device) == "fp16"


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


@pytest.mark.parametrize("expandable", [False, True])
def test_facts_carry_the_answers_of_the_device(expandable: bool) -> None:
    setup = open_setup(work(), SetupSettings(device="sim:t4", memory_budget="64MiB"))
    device = setup.device.expandable() if expandable else setup.device
    facts = describe_setup(replace(setup, device=device))
    made = new_allocator(facts)
    assert isinstance(made, CachingAllocator)
    assert (made.limit, made.config) == (64 * 2**20, AllocatorConfig(expandable_segments=expandable))
    assert new_allocator(facts, capped=False).limit is None
    assert new_allocator(facts, expandable=True).config.expandable_segments
    assert (facts.compute_capability, facts.may_spill) == (None, False)


def test_a_device_that_caches_nothing_has_an_allocator_that_counts() -> None:
    facts = describe_setup(open_setup(work(), SetupSettings(device="cpu", memory_budget="1MiB")))
    assert facts.allocator is None
    assert isinstance(new_allocator(facts), CountingAllocator)
    assert (new_allocator(facts).limit, new_allocator(facts, capped=False).limit) == (2**20, None)
