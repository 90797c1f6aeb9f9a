"""A plan as arguments of transformers, checked against the library if it is installed."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest

from autobatch.integrations import transformers
from tests.support.custom_loops import small_plan
from tests.support.libraries import imports_library, installed


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


def test_the_library_takes_every_argument() -> None:
    known = inspect.signature(installed("transformers").TrainingArguments).parameters
    assert set(transformers.arguments(small_plan(24, 7))) <= set(known)


def test_the_adapter_does_not_import_the_library() -> None:
    assert not imports_library(transformers, "transformers")


def test_the_library_reads_the_arguments_as_meant(tmp_path: Path) -> None:
    library = installed("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = library.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            **transformers.arguments(small_plan(24, 7, precision="bf16")),
        )
    assert (made.train_batch_size, made.gradient_accumulation_steps, made.bf16) == (6, 4, True)
    assert made.max_grad_norm == 0.0
