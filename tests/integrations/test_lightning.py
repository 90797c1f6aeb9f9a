"""Plans for Lightning, against the library itself and the gradient of the whole batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from autobatch import InputError, integrations
from tests.support.libraries import installed
from tests.support.trainers import gradient_of, pad, weights_of

lightning = integrations.lightning


def test_a_planned_fit_takes_the_steps_of_whole_batches() -> None:
    """Two steps of the library itself, of 20 samples each, against one backward pass per batch."""
    installed("lightning")
    from tests.support.lightning_modules import Classifier, Points, Quiet

    module, data = Classifier(), Points()
    before = {name: id(value) for name, value in vars(module).items()}
    trainer = Quiet(max_epochs=1)
    plan = lightning.plan_fit(trainer, module, data, target_batch=20, memory_budget="14KiB")
    assert {name: id(value) for name, value in vars(module).items()} == before
    assert plan.probe.limited_by == "memory"
    assert plan.accumulation_steps > 1
    assert (trainer.accumulate_grad_batches, data.batch_size) == (plan.accumulation_steps, plan.micro_batch)
    assert "Lightning: each micro-batch has the same weight" in plan.notes[0]
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


def test_what_a_plan_cannot_describe_is_refused() -> None:
    installed("lightning")
    from tests.support.lightning_modules import Classifier, Points, Quiet, Words

    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(InputError, match="a Classifier has automatic_optimization=False"):
        lightning.plan_fit(Quiet(), module, Points(), target_batch=8)
    data = Points()
    del data.batch_size
    with pytest.raises(
        InputError, match="neither Points nor Classifier has an attribute batch_size, which the plan sets"
    ):
        lightning.plan_fit(Quiet(), Classifier(), data, target_batch=8)
    with pytest.raises(InputError, match=r"plans for the precisions 32-true, .* of Lightning, found 64-true"):
        lightning.plan_fit(Quiet(precision="64-true"), Classifier(), Points(), target_batch=8)

    class Fixed(Words):
        def train_dataloader(self) -> DataLoader:  # type: ignore[type-arg]
            return DataLoader(super().train_dataloader().dataset, batch_size=3, collate_fn=pad)

    with pytest.raises(InputError, match="made a loader of 3 samples, after batch_size was set to 8"):
        lightning.plan_fit(Quiet(), Fixed(), target_batch=8)


def classifier(**members: Any) -> Any:
    """Build the classifier with other methods."""
    installed("lightning")
    from tests.support.lightning_modules import Classifier

    return type("Own", (Classifier,), members)()


def points() -> Any:
    from tests.support.lightning_modules import Points

    data = Points()
    data.setup("fit")
    return data.data


def quiet(**options: Any) -> Any:
    from tests.support.lightning_modules import Quiet

    return Quiet(max_epochs=1, **options)


def test_data_and_layers_that_hooks_make_are_planned_for_and_fitted() -> None:
    """``prepare_data``, ``setup`` and ``configure_model`` are where Lightning wants them to be made."""
    order: list[str] = []

    def setup(self: Any, stage: str) -> None:
        order.append(stage)
        self.data = points()

    def configure_model(self: Any) -> None:
        order.append("layers")
        self.network = nn.Linear(4, 2).double()

    module = classifier(
        prepare_data=lambda self: order.append("prepared"),
        setup=setup,
        configure_model=configure_model,
        train_dataloader=lambda self: DataLoader(self.data, batch_size=self.batch_size),
    )
    module.batch_size = 1
    del module.network
    state = torch.get_rng_state()
    plan = lightning.plan_fit(quiet(), module, target_batch=20, max_micro_batch=10)
    assert order == ["prepared", "fit", "layers"]
    assert torch.equal(torch.get_rng_state(), state)
    assert (plan.micro_batch, module.batch_size) == (10, 10)
    assert not hasattr(module, "data")
    trainer = quiet(callbacks=[lightning.AutobatchFinder(target_batch=20, max_micro_batch=5)])
    order.clear()
    trainer.fit(module)
    assert (trainer.global_step, trainer.accumulate_grad_batches, module.batch_size) == (2, 4, 5)
    assert order.count("prepared") == 1, "fit prepares the data itself"


def test_a_loader_for_fit_comes_back_with_the_planned_size() -> None:
    module, loader = classifier(), DataLoader(points(), batch_size=1, shuffle=True)
    trainer = quiet()
    plan = lightning.plan_fit(trainer, module, loader, target_batch=20, max_micro_batch=10)
    assert (plan.loader.batch_size, plan.loader.dataset) == (10, loader.dataset)
    trainer.fit(module, plan.loader)
    assert trainer.global_step == 2
    finder = lightning.AutobatchFinder(target_batch=20, max_micro_batch=5)
    trainer = quiet(callbacks=[finder])
    trainer.fit(classifier(), loader)
    assert (trainer.global_step, trainer.accumulate_grad_batches) == (2, 4)
    with pytest.raises(InputError, match=r"must be a torch DataLoader before trainer\.fit, found a list"):
        lightning.plan_fit(quiet(), module, [loader], target_batch=20)


def test_a_step_that_logs_reads_its_schedule_and_leaves_no_trace() -> None:
    seen: list[float] = []

    def training_step(self: Any, batch: Any, number: int) -> Any:
        seen.append(self.optimizers().param_groups[0]["lr"] + self.lr_schedulers().get_last_lr()[0])
        seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.logger.log_metrics({"epoch": self.current_epoch}, step=self.global_step)
        self.logger.experiment.add_scalar("x", 1.0)
        self.print("not in a probe")
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    library = installed("lightning")
    logged: list[Any] = []

    class Own(library.pytorch.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            logged.append(metrics)

    module = classifier(training_step=training_step)
    trainer = quiet(logger=Own())
    lightning.plan_fit(trainer, module, DataLoader(points()), target_batch=20, max_micro_batch=10)
    assert seen[:2] == [0.2, 0.1]
    assert logged == []


def test_the_hooks_around_the_transfer_run_as_in_fit() -> None:
    """The data module's own hook goes before that of the module, as in Lightning."""
    seen: set[float] = set()

    def training_step(self: Any, batch: Any) -> Any:
        seen.add(float(batch[0][0, 0] / self.first))
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    installed("lightning")
    from tests.support.lightning_modules import Points

    class Constant(Points):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            self.data = torch.utils.data.TensorDataset(torch.ones(40, 4).double(), torch.zeros(40).long())

    def plan(data: Any) -> set[float]:
        seen.clear()
        module = classifier(
            training_step=training_step,
            first=1.0,
            on_after_batch_transfer=lambda self, batch, _: [batch[0] * 2, batch[1]],
        )
        lightning.plan_fit(quiet(), module, data, target_batch=20, max_micro_batch=10)
        return seen

    assert plan(Constant()) == {2.0}
    own = type(
        "Own", (Constant,), {"on_after_batch_transfer": lambda self, batch, _: [batch[0] * 3, batch[1]]}
    )
    assert plan(own()) == {3.0}


@pytest.mark.parametrize("form", ["one", "list", "dict", "both", "dicts"])
def test_optimizers_are_found_in_every_form(form: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    forms: dict[str, Any] = {
        "one": optimizer,
        "list": [optimizer],
        "dict": {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}},
        "both": ([optimizer], [schedule]),
        "dicts": [{"optimizer": optimizer, "lr_scheduler": schedule}],
    }
    module = classifier(configure_optimizers=lambda self: forms[form])
    workload = lightning.workload(module, DataLoader(points()))
    assert workload.optimizer(module, 0.3) == [optimizer]  # type: ignore[arg-type]
    assert workload.learning_rate == 0.1


def test_optimizers_that_lightning_does_not_step_are_refused() -> None:
    two = classifier(
        configure_optimizers=lambda self: [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]
    )
    with pytest.raises(InputError, match="returned 2 optimizers, and Lightning steps several only with"):
        lightning.plan_fit(quiet(), two, DataLoader(points()), target_batch=20)
    none = classifier(configure_optimizers=lambda self: None)
    with pytest.raises(InputError, match=r"must return an optimizer, found nothing \(None\)"):
        lightning.plan_fit(quiet(), none, DataLoader(points()), target_batch=20)


def test_the_callback_plans_before_the_data_are_read(caplog: pytest.LogCaptureFixture) -> None:
    installed("lightning")
    from tests.support.lightning_modules import Classifier, Points, Quiet

    finder = lightning.AutobatchFinder(target_batch=20, memory_budget="14KiB")
    trainer, data = Quiet(max_epochs=2, callbacks=[finder]), Points()
    with caplog.at_level(logging.INFO, logger="autobatch"):
        trainer.fit(Classifier(), data)
    plan = finder.plan
    assert plan is not None
    assert plan.accumulation_steps > 1
    assert data.batch_size == plan.micro_batch
    assert trainer.accumulate_grad_batches == plan.accumulation_steps
    assert trainer.global_step == 4
    assert str(plan) in "\n".join(caplog.messages)
