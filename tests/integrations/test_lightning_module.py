"""Modules outside of ``fit``: their hooks run, and nothing that they log or set is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autobatch.core.errors import InputError
from autobatch.integrations import lightning
from autobatch.integrations.lightning_module import configured, outside_of_fit, transferred
from tests.integrations.test_lightning import quiet_and_at_home
from tests.support.libraries import installed

__all__ = ["quiet_and_at_home"]


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
    plan = lightning.plan(quiet(), module, target_batch=20, max_micro_batch=10)
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
    plan = lightning.plan(trainer, module, loader, target_batch=20, max_micro_batch=10)
    assert (plan.loader.batch_size, plan.loader.dataset) == (10, loader.dataset)
    trainer.fit(module, plan.loader)
    assert trainer.global_step == 2
    finder = lightning.AutobatchFinder(target_batch=20, max_micro_batch=5)
    trainer = quiet(callbacks=[finder])
    trainer.fit(classifier(), loader)
    assert (trainer.global_step, trainer.accumulate_grad_batches) == (2, 4)
    with pytest.raises(InputError, match=r"must be a torch DataLoader before trainer\.fit, found a list"):
        lightning.plan(quiet(), module, [loader], target_batch=20)


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
    lightning.plan(trainer, module, DataLoader(points()), target_batch=20, max_micro_batch=10)
    assert seen[:2] == [0.2, 0.1]
    assert logged == []


def test_the_hooks_around_the_transfer_run_once_each() -> None:
    """The data module's own hook goes before that of the module, as in Lightning."""
    installed("lightning")
    from tests.support.lightning_modules import Points

    twice = classifier(on_after_batch_transfer=lambda self, batch, _: [batch[0] * 2, batch[1]])
    data = Points()
    one = [torch.ones(1), torch.zeros(1)]
    with outside_of_fit(twice, quiet(), data):
        assert float(transferred(twice, one)[0]) == 2
        type(data).on_after_batch_transfer = lambda self, batch, _: [batch[0] * 3, batch[1]]
        try:
            assert float(transferred(twice, one)[0]) == 3
        finally:
            del type(data).on_after_batch_transfer
    assert float(transferred(twice, one)[0]) == 2


@pytest.mark.parametrize("form", ["one", "list", "dict", "both", "dicts"])
def test_optimizers_and_schedules_are_found_in_every_form(form: str) -> None:
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
    assert configured(module) == ([optimizer], [] if form in ("one", "list") else [schedule])


def test_optimizers_that_lightning_does_not_step_are_refused() -> None:
    two = classifier(
        configure_optimizers=lambda self: [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]
    )
    with pytest.raises(InputError, match="returned 2 optimizers, and Lightning steps several only with"):
        lightning.plan(quiet(), two, DataLoader(points()), target_batch=20)
    none = classifier(configure_optimizers=lambda self: None)
    with pytest.raises(InputError, match=r"must return an optimizer, found nothing \(None\)"):
        lightning.plan(quiet(), none, DataLoader(points()), target_batch=20)
