"""Validation figures do not depend on the micro-batch, and running out of memory does not end them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.device.cpu import SilentMeter
from autobatch.errors import DoesNotFitError
from autobatch.training.evaluation import Reach, evaluate
from autobatch.workload import Loss
from tests.training.helpers import (
    IGNORED,
    language_model,
    make_loop,
    make_workload,
    network,
    points,
    token_loss,
    tokens,
)


def accuracy(model: nn.Module, batch) -> dict:
    inputs, labels = batch
    return {"accuracy": (model(inputs).argmax(1) == labels).double().mean()}


def token_accuracy(model: nn.Module, batch) -> dict:
    ids, labels = batch
    counted = labels != IGNORED
    return {"accuracy": Loss(((model(ids).argmax(-1) == labels) & counted).sum(), counted.sum())}


KINDS = {
    "mean": make_workload(validation_data=points(23, seed=1), metrics=accuracy),
    "tokens": make_workload(
        model=language_model,
        train_data=tokens(),
        loss=token_loss,
        validation_data=tokens(23, seed=1),
        metrics=token_accuracy,
    ),
}


def figures(workload, reach: int | Reach, **options) -> dict[str, float]:
    loop = make_loop(workload)
    reach = reach if isinstance(reach, Reach) else Reach(reach)
    return evaluate(workload, loop.trainee, device=loop.device, meter=SilentMeter(), reach=reach, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch", [1, 2, 7, 22])
def test_figures_are_those_of_all_samples_at_once(kind: str, micro_batch: int) -> None:
    whole = figures(KINDS[kind], 23)
    assert set(whole) == {"loss", "accuracy"}
    assert figures(KINDS[kind], micro_batch) == pytest.approx(whole, rel=1e-12)


def limited(limit: int, seen: list[int]):
    def loss(model, batch):
        seen.append(len(batch[0]))
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


def test_out_of_memory_halves_the_micro_batch_and_counts_no_sample_twice() -> None:
    seen: list[int] = []
    workload = make_workload(validation_data=points(23, seed=1), loss=limited(5, seen), metrics=accuracy)
    assert figures(workload, 16) == pytest.approx(figures(KINDS["mean"], 23), rel=1e-12)
    assert seen == [16, 8, 4, 4, 4, 4, 4, 3]


def test_out_of_memory_at_one_sample_is_said() -> None:
    workload = make_workload(validation_data=points(3), loss=limited(0, []))
    with pytest.raises(DoesNotFitError, match="in validation at a micro-batch of 1"):
        figures(workload, 2)


def test_modes_come_back_one_by_one_and_weights_are_untouched() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5), network(), nn.Dropout(0.5)).double()

    workload = make_workload(model=build, validation_data=points(9))
    loop = make_loop(workload)
    model = loop.trainee.model.train()
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(workload, loop.trainee, device=loop.device, meter=SilentMeter(), reach=Reach(4))
    assert [module.training for module in (model, *model)] == [True, False, True, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_without_validation_data_there_are_no_figures() -> None:
    assert figures(make_workload(), 4) == {}
