"""What changes the key of an answer, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autobatch.core.options import Options
from autobatch.setup.setup import Role, Setup, device_key, open_setup, setup_key, stand_in_optimizers
from tests.support.probes import amsgrad, mlp, vectors, work


def opened(role: Role | None = None, **options: Any) -> Setup:
    return open_setup(
        work(), Options().with_values(device="cpu", memory_budget="1MiB", **options), role or Role()
    )


def key_of(setup: Setup) -> dict[str, Any]:
    return setup_key(setup, setup.device.describe())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("keeps_batches", {"own_loop": True}),
        ("ema", {"ema": 0.9}),
        ("max_grad_norm", {"max_grad_norm": 1.0}),
        ("world_size", {"role": Role(world=2)}),
    ],
)
def test_a_setting_that_changes_what_fits_changes_the_key(field: str, change: dict[str, Any]) -> None:
    before, after = key_of(opened()), key_of(opened(**change))
    assert {name for name in before if before[name] != after[name]} == {field}


def test_the_workload_changes_the_key_by_its_model_samples_and_optimizer() -> None:
    setup = opened()
    for field, other in (
        ("model", work(lambda: mlp(65))),
        ("samples", work(train_data=vectors(width=17))),
        ("optimizer", work(optimizer=amsgrad)),
    ):
        changed = key_of(open_setup(other, Options().with_values(device="cpu", memory_budget="1MiB")))
        assert {name for name, value in key_of(setup).items() if changed[name] != value} == {field}


def test_a_resume_asks_for_the_same_hardware_torch_and_precision() -> None:
    key = device_key(replace(opened(), precision="bf16"))
    assert (key["precision"], key["torch"], key["device_kind"]) == ("bf16", str(torch.__version__), "cpu")


def test_an_optimizer_that_needs_the_model_has_no_stand_in() -> None:
    def failing(_: object, __: float) -> torch.optim.Optimizer:
        raise KeyError("head")

    assert [type(one) for one in stand_in_optimizers(work())] == [torch.optim.AdamW]
    assert stand_in_optimizers(work(optimizer=failing)) == []
