"""Plans as keyword arguments of other libraries."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest

from autobatch import InputError, integrations
from autobatch.planning import make_plan
from tests.support.custom_loops import small_plan
from tests.support.libraries import imports_library, installed

accelerate = integrations.accelerate
lightning = integrations.lightning
transformers = integrations.transformers

ADAPTERS = [
    (transformers, "TrainingArguments", "the Trainer"),
    (lightning, "Trainer", "Lightning"),
    (accelerate, "Accelerator", "accelerate"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_arguments_follow_the_plan(precision: str) -> None:
    plan = small_plan(24, 7, precision=precision)
    assert transformers.arguments(plan, max_grad_norm=0.5) == {
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 4,
        "learning_rate": 0.1,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "max_grad_norm": 0.5,
    }
    assert transformers.arguments(plan)["max_grad_norm"] == 0.0
    assert lightning.arguments(plan, max_grad_norm=0.5) == {
        "accumulate_grad_batches": 4,
        "precision": {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision],
        "gradient_clip_val": 0.5,
        "gradient_clip_algorithm": "norm",
    }
    assert accelerate.arguments(plan) == {
        "gradient_accumulation_steps": 4,
        "mixed_precision": {"fp32": "no"}.get(precision, precision),
    }
    assert lightning.batch_size(plan) == accelerate.batch_size(plan) == 6


@pytest.mark.parametrize(("adapter", "taker", "name"), ADAPTERS)
def test_a_plan_for_other_ranks_or_half_the_size_is_told(
    adapter: Any, taker: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="a target batch of 96 or 98 needs fewer steps"):
        found = adapter.arguments(make_plan(target_batch=97, micro_batch_limit=67, learning_rate=0.1))
    # 97 is a prime number, so only micro-batches of one sample are of equal size.
    assert 97 in found.values()
    with pytest.raises(InputError, match=f"the plan is for 2 ranks, and {name} runs in 1 process, so"):
        adapter.arguments(small_plan(24, 7, world_size=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=f"the plan is for 1 rank, and {name} runs in 2 processes"):
        adapter.arguments(small_plan(24, 7))
    assert 2 in adapter.arguments(small_plan(24, 7, world_size=2)).values()


@pytest.mark.parametrize(("adapter", "taker", "name"), ADAPTERS)
def test_the_library_takes_every_argument_and_is_imported_at_first_use(
    adapter: ModuleType, taker: str, name: str
) -> None:
    library = adapter.__name__.rpartition(".")[2]
    known = inspect.signature(getattr(installed(library), taker)).parameters
    assert set(adapter.arguments(small_plan(24, 7))) <= set(known)
    assert not imports_library(adapter, library)
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        _ = adapter.Trainer
