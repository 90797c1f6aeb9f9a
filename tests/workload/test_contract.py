"""The fields of a workload, checked when it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.workload.contract import WholeBatchLoss, Workload, kind_of
from tests.support.training import make_workload

FIELDS: dict[str, Any] = {
    "model": lambda: None,
    "train_data": [1, 2],
    "loss": lambda model, batch: None,
    "optimizer": lambda params, learning_rate: None,
    "learning_rate": 0.1,
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", 3, r"Workload\(model=…\) must be a function, found an int"),
        ("loss", None, r"Workload\(loss=…\) must be a function, found nothing"),
        ("optimizer", "adam", r"Workload\(optimizer=…\) must be a function, found a str"),
        ("collate", 3, r"Workload\(collate=…\) must be a function or None, found an int"),
        ("schedule", [], r"Workload\(schedule=…\) must be a function or None, found a list"),
        ("metrics", 3, r"Workload\(metrics=…\) must be a function or None"),
        ("size_of", 3, r"Workload\(size_of=…\) must be a function or None"),
        ("train_data", iter([1]), r"is a list_iterator, which can be read only once, .* give the function"),
        ("train_data", None, r"Workload\(train_data=…\) must have .* found nothing"),
        ("train_data", [], r"Workload\(train_data=…\) has 0 samples: at least 1 is needed"),
        ("validation_data", [], r"Workload\(validation_data=…\) has 0 samples: at least 1 is needed"),
        ("validation_data", 3, r"Workload\(validation_data=…\) must have __getitem__"),
        ("learning_rate", 0, "must be a finite number over 0, found 0"),
        ("learning_rate", "1e-3", "must be a finite number over 0, found '1e-3'"),
        ("learning_rate", True, "must be a finite number over 0, found True"),
        ("learning_rate", float("nan"), "must be a finite number over 0, found nan"),
        ("learning_rate", float("inf"), "must be a finite number over 0, found inf"),
        ("base_batch", 0, r"Workload\(base_batch=…\) must be 1 or more, or None, found 0"),
        ("base_batch", 2.5, r"Workload\(base_batch=…\) must be 1 or more, or None, found 2.5"),
        ("base_batch", True, r"Workload\(base_batch=…\) must be 1 or more, or None, found True"),
        ("name", "", r"Workload\(name=…\) must be text that can name a folder, found ''"),
        ("name", "../up", r"Workload\(name=…\) must be text that can name a folder, found '../up'"),
        ("name", "a\0b", r"Workload\(name=…\) must be text that can name a folder"),
        ("name", "\x1b[31mred", r"can name a folder, found '\\x1b\[31mred'"),
        ("name", "x" * 256, r"can name a folder, found 'xx"),
        ("name", "two\u2028lines", r"can name a folder, found 'two\\u2028lines'"),
        ("name", "half\ud800", r"can name a folder, found 'half\\ud800'"),
        ("name", 3, r"Workload\(name=…\) must be text that can name a folder, found 3"),
    ],
)
def test_an_invalid_field_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload(**FIELDS | {field: value})


def test_a_model_that_is_already_built_is_refused() -> None:
    with pytest.raises(InputError, match=r"found a Linear that is already built: write model=lambda: …"):
        Workload(**FIELDS | {"model": nn.Linear(1, 1)})
    assert Workload(**FIELDS | {"model": nn.Identity}).model is nn.Identity


def test_a_whole_batch_loss_takes_functions_and_runs_one_after_the_other() -> None:
    loss = WholeBatchLoss(represent=lambda model, batch: model(batch), loss=lambda model, rows: rows.sum())
    assert loss(nn.Identity(), torch.ones(3)).item() == 3.0
    with pytest.raises(InputError, match=r"WholeBatchLoss\(represent=…\) must be a function, found nothing"):
        WholeBatchLoss(represent=None, loss=max)
    with pytest.raises(InputError, match=r"WholeBatchLoss\(loss=…\) must be a function, found a str"):
        WholeBatchLoss(represent=max, loss="mean")


def test_the_type_of_a_value_is_described() -> None:
    assert [kind_of(value) for value in ([], 3, None)] == ["a list", "an int", "nothing (None)"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"optimizer": torch.optim.SGD(torch.nn.Linear(1, 1).parameters())},
            r"optimizer=…\) must be a function, found a SGD: write optimizer=lambda params, learning_rate:",
        ),
        (
            {"loss": torch.nn.functional.cross_entropy},
            r"called as loss\(model, batch\), but cross_entropy takes outputs and targets: write loss=lambda",
        ),
        ({"loss": torch.nn.MSELoss()}, r"but MSELoss takes outputs and targets"),
    ],
)
def test_a_field_of_the_wrong_kind_is_answered_with_what_to_write(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_workload(**fields)
