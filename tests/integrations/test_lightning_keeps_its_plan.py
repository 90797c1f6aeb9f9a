"""The state that a plan for Lightning leaves in the module, and the steps of ``fit``, by counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.support.libraries import installed

installed("lightning")

from autobatch.integrations import lightning  # noqa: E402

SAMPLES = 120
BATCH = 32


class Meter:
    """A meter of the user's, which is no module."""

    def __init__(self) -> None:
        self.total, self.values = 0, torch.zeros(2)


def module(**members: Any) -> Any:
    """Build a classifier that lists the samples of each optimizer step."""
    installed("lightning")
    from tests.support.lightning_modules import Classifier

    def training_step(self: Any, batch: Any, number: int) -> Any:
        self.steps[-1] += len(batch[0])
        return cross_entropy(self.network(batch[0]), batch[1])

    def optimizer_step(self: Any, *args: Any, **more: Any) -> None:
        super(made, self).optimizer_step(*args, **more)
        self.steps.append(0)

    made = type(
        "Counting",
        (Classifier,),
        {"training_step": training_step, "optimizer_step": optimizer_step, **members},
    )
    built: Any = made()
    built.steps = [0]
    return built


def loader(batch_size: int = 1) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()), batch_size=batch_size)


def quiet(**options: Any) -> Any:
    from tests.support.lightning_modules import Quiet

    return Quiet(max_epochs=2, **options)


def test_the_probe_leaves_nothing_in_what_the_module_holds() -> None:
    """Lightning's own pattern for figures of an epoch, a metric, a meter, a tensor and a layer's list."""
    torchmetrics = installed("torchmetrics")

    def training_step(self: Any, batch: Any, number: int) -> Any:
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.training_step_outputs.append(loss.detach())
        self.network.seen["train"].append(len(batch[0]))
        self.metric.update(loss.detach())
        self.meter.total += 1
        self.meter.values += 1
        self.total += 1
        return loss

    epochs: list[tuple[int, float, float]] = []

    def on_train_epoch_end(self: Any) -> None:
        mean = float(torch.stack(self.training_step_outputs).mean())
        epochs.append((len(self.training_step_outputs), mean, float(self.metric.compute())))
        self.training_step_outputs.clear()
        self.metric.reset()

    def fitted(planned: bool) -> list[tuple[int, float, float]]:
        epochs.clear()
        own = module(training_step=training_step, on_train_epoch_end=on_train_epoch_end)
        own.training_step_outputs, own.network.seen, own.meter = outputs, seen, meter = (
            [],
            {"train": []},
            Meter(),
        )
        own.metric, own.total = torchmetrics.MeanMetric(), torch.zeros(1)
        finder = lightning.AutobatchFinder(target_batch=BATCH, max_micro_batch=BATCH)
        quiet(callbacks=[finder] if planned else []).fit(own, loader(1 if planned else BATCH))
        assert own.training_step_outputs is outputs
        taken = 2 * -(-SAMPLES // BATCH)
        assert (len(seen["train"]), meter.total, float(own.total)) == (taken, taken, taken)
        assert meter.values.tolist() == [taken, taken]
        return [*epochs]

    assert fitted(planned=True) == fitted(planned=False)


def saved_by(micro_batch: int, folder: Path, **when: Any) -> None:
    """Fit with a micro-batch, and save checkpoints in a folder."""
    callback = installed("lightning").pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, **when)
    finder = lightning.AutobatchFinder(target_batch=BATCH, max_micro_batch=micro_batch)
    own = module()
    quiet(enable_checkpointing=True, callbacks=[callback, finder]).fit(own, loader())
    assert own.steps == [32, 32, 32, 24] * 2 + [0]


@pytest.mark.parametrize(("before", "after", "step"), [(32, 8, 2), (32, 8, 6), (8, 4, 6), (4, 32, 2)])
def test_a_fit_resumed_with_another_micro_batch_takes_whole_steps(
    tmp_path: Path, before: int, after: int, step: int
) -> None:
    saved_by(before, tmp_path, every_n_train_steps=2)
    own = module()
    finder = lightning.AutobatchFinder(target_batch=BATCH, max_micro_batch=after)
    trainer, data = quiet(callbacks=[finder]), loader()
    checkpoint = tmp_path / f"epoch={step // 4}-step={step}.ckpt"
    trainer.fit(own, data, ckpt_path=str(checkpoint), weights_only=False)
    assert trainer.global_step == 8, "as many as without a stop"
    # Lightning begins the data of the epoch anew, so its short batch comes only if the counts end there.
    assert own.steps[:1] == [32]
    assert own.steps[2:] == [32, 32, 32, 24] * (1 - step // 4) + [0]
