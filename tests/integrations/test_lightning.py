"""Plans for Lightning, against the library itself and the gradient of the whole batch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from autobatch.core.errors import InputError
from autobatch.integrations import lightning
from autobatch.planning import make_plan
from tests.support.custom_loops import small_plan
from tests.support.libraries import imports_library, installed
from tests.support.trainers import gradient_of, pad, weights_of
from tests.support.training import apart, make_workload, mean_loss, reference, weights


@pytest.fixture(autouse=True)
def quiet_and_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


def test_a_plan_for_other_ranks_or_half_the_size_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="a target batch of 96 or 98 needs fewer steps"):
        lightning.arguments(make_plan(target_batch=97, micro_batch_limit=67, learning_rate=0.1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="the plan is for 1 rank, and Lightning runs in 2 processes"):
        lightning.arguments(small_plan(24, 7))


def test_the_library_takes_every_argument() -> None:
    known = inspect.signature(installed("lightning").Trainer).parameters
    assert set(lightning.arguments(small_plan(24, 7))) <= set(known)


def test_the_adapter_does_not_import_the_library() -> None:
    assert not imports_library(lightning, "lightning")
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        _ = lightning.Trainer


def test_the_library_takes_the_step_of_the_arguments(tmp_path: Path) -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(24)], mean_loss)
    library = installed("lightning")
    plan = small_plan(24, 7)
    torch.manual_seed(0)
    network = workload.model()

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch, number):  # type: ignore[no-untyped-def]
            return mean_loss(self.network, batch)

        def configure_optimizers(self):  # type: ignore[no-untyped-def]
            return torch.optim.SGD(self.parameters(), lr=plan.learning_rate)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = library.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, **quiet,
        **lightning.arguments(plan),
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(workload.train_data, batch_size=lightning.batch_size(plan)))
    assert apart(weights(network), expected) < 1e-6


def test_a_planned_fit_takes_the_steps_of_whole_batches() -> None:
    """Two steps of the library itself, of 20 samples each, against one backward pass per batch."""
    installed("lightning")
    from tests.support.lightning_modules import Classifier, Points, Quiet

    module, data = Classifier(), Points()
    before = {name: id(value) for name, value in vars(module).items()}
    trainer = Quiet(max_epochs=1)
    plan = lightning.plan(trainer, module, data, target_batch=20, memory_budget="14KiB")
    assert {name: id(value) for name, value in vars(module).items()} == before
    assert plan.probe.limited_by == "memory"
    assert plan.accumulation_steps > 1
    assert (trainer.accumulate_grad_batches, data.batch_size) == (plan.accumulation_steps, plan.micro_batch)
    trainer.fit(module, data)
    expected = Classifier()
    for first in (0, 20):
        inputs, labels = data.data[first : first + 20]
        gradient = gradient_of(expected, cross_entropy(expected.network(inputs), labels))
        torch.nn.utils.vector_to_parameters(
            weights_of(expected) - 0.1 * gradient, list(expected.parameters())
        )
    assert trainer.global_step == 2
    assert float((weights_of(module) - weights_of(expected)).norm()) < 1e-12


def test_a_note_names_the_weight_of_micro_batches() -> None:
    installed("lightning")
    from tests.support.lightning_modules import Quiet, Words

    plan = lightning.plan(Quiet(max_steps=1), Words(), target_batch=16, max_micro_batch=8)
    assert "Lightning: each micro-batch has the same weight" in plan.notes[0]
    whole = lightning.plan(Quiet(max_steps=1), Words(), target_batch=8, max_micro_batch=8)
    assert not any("same weight" in note for note in whole.notes)


def test_what_a_plan_cannot_describe_is_refused() -> None:
    installed("lightning")
    from tests.support.lightning_modules import Classifier, Points, Quiet, Words

    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(InputError, match="a Classifier has automatic_optimization=False"):
        lightning.plan(Quiet(), module, Points(), target_batch=8)
    data = Points()
    del data.batch_size
    with pytest.raises(
        InputError, match="neither Points nor Classifier has an attribute batch_size, which the plan sets"
    ):
        lightning.plan(Quiet(), Classifier(), data, target_batch=8)
    with pytest.raises(InputError, match=r"plans for the precisions 32-true, .* of Lightning, found 64-true"):
        lightning.plan(Quiet(precision="64-true"), Classifier(), Points(), target_batch=8)

    class Fixed(Words):
        def train_dataloader(self) -> DataLoader:  # type: ignore[type-arg]
            return DataLoader(super().train_dataloader().dataset, batch_size=3, collate_fn=pad)

    with pytest.raises(InputError, match="made a loader of 3 samples, after batch_size was set to 8"):
        lightning.plan(Quiet(), Fixed(), target_batch=8)
