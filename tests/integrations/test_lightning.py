"""A plan as arguments of Lightning, checked against the library if it is installed."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from autobatch.integrations import lightning
from tests.support.custom_loops import small_plan
from tests.support.libraries import imports_library, installed
from tests.support.training import apart, make_workload, mean_loss, reference, weights


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_arguments_follow_the_plan(precision: str) -> None:
    plan = small_plan(24, 7, precision=precision)
    assert lightning.arguments(plan, max_grad_norm=0.5) == {
        "accumulate_grad_batches": 4,
        "precision": {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision],
        "gradient_clip_val": 0.5,
        "gradient_clip_algorithm": "norm",
    }
    assert lightning.batch_size(plan) == 6


def test_the_library_takes_every_argument() -> None:
    known = inspect.signature(installed("lightning").Trainer).parameters
    assert set(lightning.arguments(small_plan(24, 7))) <= set(known)


def test_the_adapter_does_not_import_the_library() -> None:
    assert not imports_library(lightning, "lightning")


def test_the_library_takes_the_step_of_the_plan(tmp_path: Path) -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(24)], mean_loss)
    library = installed("lightning")
    plan = small_plan(24, 7)
    torch.manual_seed(0)
    network = workload.model()

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch, number):
            return mean_loss(self.network, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=plan.learning_rate)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = library.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, **quiet,
            **lightning.arguments(plan),
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(workload.train_data, batch_size=lightning.batch_size(plan)))
    assert apart(weights(network), expected) < 1e-6
