"""A plan in the words of other libraries, held to their own signatures where they are installed."""

from __future__ import annotations

import inspect
import warnings
from importlib import import_module

import pytest
import torch
from torch.utils.data import DataLoader

from autobatch.core.errors import InputError
from autobatch.integrations import accelerate, lightning, transformers
from autobatch.planning import even_split, make_plan
from tests.support.training import apart, make_workload, mean_loss, reference, weights

PRECISIONS = ["fp32", "bf16", "fp16"]


def a_plan(target: int = 24, limit: int = 7, **changes):
    return make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=0.1, **changes)


def installed(library: str):
    """The library itself; what it warns of on its own import is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(library, exc_type=ImportError)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equal_micro_batches_are_the_largest_that_fit(ranks: int) -> None:
    for share in range(1, 61):
        for limit in range(1, 70):
            size, steps = even_split(a_plan(share * ranks, limit, world_size=ranks))
            # The plan's own micro-batch is the largest that the search certified for this split.
            allowed = a_plan(share * ranks, limit, world_size=ranks).micro_batch
            assert size * steps == share
            assert size <= allowed <= limit
            assert not [bigger for bigger in range(size + 1, allowed + 1) if share % bigger == 0]


def test_unequal_shares_are_refused_with_what_would_do() -> None:
    with pytest.raises(InputError, match=r"24 over 5 ranks.*ask for 20 or 25"):
        even_split(a_plan(24, 7, world_size=5))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_words_of_each_library(precision) -> None:
    plan = a_plan(precision=precision)
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
        "mixed_precision": {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[precision],
    }
    assert lightning.batch_size(plan) == accelerate.batch_size(plan) == 6


@pytest.mark.parametrize(
    ("library", "name", "adapter"),
    [
        ("transformers", "TrainingArguments", transformers),
        ("lightning", "Trainer", lightning),
        ("accelerate", "Accelerator", accelerate),
    ],
)
def test_the_library_knows_the_words(library: str, name: str, adapter) -> None:
    known = inspect.signature(getattr(installed(library), name)).parameters
    assert set(adapter.arguments(a_plan())) <= set(known)


@pytest.mark.parametrize("adapter", ["transformers", "lightning", "accelerate"])
def test_an_adapter_does_not_import_its_library(adapter: str) -> None:
    module = import_module(f"autobatch.integrations.{adapter}")
    assert all(getattr(value, "__name__", "").split(".")[0] != adapter for value in vars(module).values())


def test_accelerate_takes_the_step_of_the_plan() -> None:
    """Equal micro-batches of a mean over samples: what the adapter promises, in float64."""
    workload = make_workload()
    expected, _ = reference(workload, [range(24)], mean_loss)
    library = installed("accelerate")
    plan = a_plan()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = library.Accelerator(cpu=True, **accelerate.arguments(plan))
        model, optimizer, loader = accelerator.prepare(
            module := workload.model(),
            torch.optim.SGD(module.parameters(), lr=plan.learning_rate),
            DataLoader(workload.train_data, batch_size=accelerate.batch_size(plan)),
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    assert apart(weights(module), expected) < 1e-12


def test_lightning_takes_the_step_of_the_plan(tmp_path) -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(24)], mean_loss)
    library = installed("lightning")
    plan = a_plan()
    torch.manual_seed(0)
    network = workload.model()

    class TrialSpec(library.LightningModule):
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
        trainer.fit(TrialSpec(), DataLoader(workload.train_data, batch_size=lightning.batch_size(plan)))
    assert apart(weights(network), expected) < 1e-6


def test_transformers_takes_the_arguments(tmp_path) -> None:
    library = installed("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = library.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, **transformers.arguments(a_plan(precision="bf16"))
        )
    assert (made.train_batch_size, made.gradient_accumulation_steps, made.bf16) == (6, 4, True)
    assert made.max_grad_norm == 0.0
