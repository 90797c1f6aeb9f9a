"""The callback of Lightning, against the library itself and the gradient of the whole batch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from autobatch import InputError
from autobatch.integrations.lightning import AutobatchFinder
from tests.support.libraries import installed
from tests.support.training import apart, make_workload, mean_loss, reference, weights

pytestmark = pytest.mark.xdist_group("lightning")


def lit() -> Any:
    """Import the modules when a test runs: of two workers only one needs Lightning."""
    installed("lightning")
    return import_module("tests.support.lightning_modules")


def fitted(module: Any, data: Any = None, *, epochs: int = 1, trainer: Any = None, **options: Any) -> Any:
    """Fit with the callback, with 0 epochs up to the training, and return the plan and the trainer."""
    finder = AutobatchFinder(**{"target_batch": 20, "max_micro_batch": 10, **options})
    library = lit().Quiet(max_epochs=epochs, callbacks=[finder], **(trainer or {}))
    library.fit(module, data)
    return finder.plan, library


def classifier(**members: Any) -> Any:
    """Build the classifier with other methods."""
    return type("Own", (lit().Classifier,), members)()


def points() -> Any:
    data = lit().Points()
    data.setup("fit")
    return data.data


def test_a_planned_fit_takes_the_steps_of_whole_batches() -> None:
    """Two steps of the library itself, of 20 samples each, against one backward pass per batch."""
    module, data = lit().Classifier(), lit().Points()
    plan, trainer = fitted(module, data, memory_budget="14KiB", max_micro_batch=None)
    assert plan.probe.limited_by == "memory"
    assert plan.accumulation_steps > 1
    assert (trainer.accumulate_grad_batches, data.batch_size) == (plan.accumulation_steps, plan.micro_batch)
    assert "Lightning: each micro-batch has the same weight" in plan.notes[0]
    plain = make_workload(model=lambda: lit().Classifier().network, train_data=data.data)
    assert trainer.global_step == 2
    assert apart(weights(module), reference(plain, [range(20), range(20, 40)], mean_loss)[0]) < 1e-12


def without_batch_size() -> Any:
    data = lit().Points()
    del data.batch_size
    return data


def of_fixed_size() -> Any:
    data = lit().Points()
    data.train_dataloader = lambda: DataLoader(data.data, batch_size=3)  # type: ignore[method-assign]
    return data


def two_optimizers(module: Any) -> Any:
    return [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        ({"automatic_optimization": False}, None, "automatic_optimization=False"),
        ({}, without_batch_size, "no attribute batch_size, which the plan sets"),
        ({}, of_fixed_size, "made a loader of 3 samples, after batch_size was set to 10"),
        ({}, lambda: [DataLoader(points())], "batch size of a list cannot be changed"),
        ({"configure_optimizers": two_optimizers}, None, "2 optimizers"),
        ({"configure_optimizers": lambda self: None}, None, r"must return an optimizer, found nothing"),
    ],
)
def test_what_a_plan_cannot_describe_is_refused(module: dict[str, Any], data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted(classifier(**module), (data or lit().Points)(), epochs=0)


def test_data_and_layers_that_hooks_make_are_planned_for_and_fitted() -> None:
    """``setup`` and ``configure_model`` are where Lightning wants them to be made."""

    def setup(self: Any, stage: str) -> None:
        self.data = points()

    def configure_model(self: Any) -> None:
        self.network = nn.Linear(4, 2).double()

    loader = lambda self: DataLoader(self.data, batch_size=self.batch_size)  # noqa: E731
    module = classifier(setup=setup, configure_model=configure_model, train_dataloader=loader)
    module.batch_size = 1
    del module.network
    _, trainer = fitted(module, max_micro_batch=5)
    assert (trainer.global_step, trainer.accumulate_grad_batches, module.batch_size) == (2, 4, 5)


def test_a_loader_for_fit_gets_the_planned_size() -> None:
    loader = DataLoader(points(), batch_size=1, shuffle=True)
    plan, trainer = fitted(classifier(), loader, max_micro_batch=5)
    assert (plan.micro_batch, loader.batch_size) == (5, 5)
    assert (trainer.global_step, trainer.accumulate_grad_batches) == (2, 4)


def test_a_step_that_logs_reads_its_rate_and_leaves_no_trace() -> None:
    """Nothing of the probe is in the lists, metrics and tensors of the module, nor in a logger."""
    torchmetrics = installed("torchmetrics")
    logged: list[Any] = []

    class Own(installed("lightning").pytorch.loggers.logger.DummyLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            logged.append(metrics)

    def training_step(self: Any, batch: Any, number: int) -> Any:
        assert self.optimizers().param_groups[0]["lr"] == self.trainer.optimizers[0].param_groups[0]["lr"]
        self.logger.log_metrics({"epoch": self.current_epoch}, step=self.global_step)
        self.logger.experiment.add_scalar("x", 1.0)
        self.print("not in a probe")
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.outputs["train"].append(loss.detach())
        self.metric.update(loss.detach())
        self.total += 1
        return loss

    module = classifier(training_step=training_step)
    module.outputs, module.metric, module.total = {"train": []}, torchmetrics.MeanMetric(), torch.zeros(1)
    before = {name: id(value) for name, value in vars(module).items() if name not in ("_trainer", "_device")}
    fitted(module, DataLoader(points()), epochs=0, trainer={"logger": Own()})
    assert {name: id(vars(module)[name]) for name in before} == before
    assert (logged, module.outputs, float(module.total)) == ([], {"train": []}, 0.0)
    assert not module.metric.update_called


def test_the_hooks_around_the_transfer_run_as_in_fit() -> None:
    """The data module's own hook goes before that of the module, as in Lightning."""
    ran: list[float] = []
    seen: list[float] = []

    def training_step(self: Any, batch: Any) -> Any:
        seen.append(float(batch[0][0, 0]))
        return cross_entropy(self.network(batch[0]), batch[1])

    def filled(value: float) -> dict[str, Any]:
        def hook(self: Any, batch: Any, number: int) -> Any:
            ran.append(value)
            return [torch.full_like(batch[0], value), batch[1]]

        return {"on_after_batch_transfer": hook}

    for data, value in ((lit().Points, 2.0), (type("Own", (lit().Points,), filled(3.0)), 3.0)):
        ran.clear()
        seen.clear()
        fitted(classifier(training_step=training_step, **filled(2.0)), data(), epochs=0)
        assert {*ran} == {*seen} == {value}
