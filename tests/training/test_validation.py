"""Validation metrics are independent of the micro-batch."""

from __future__ import annotations

import math

import pytest
from torch import nn

from autobatch import Loss
from autobatch.training.validation import Validator, check_validation
from tests.support.training import (
    IGNORED,
    INFO_NCE,
    language_model,
    make_loop,
    make_workload,
    points,
    token_loss,
    tokens,
)

HELD_OUT = points(23, seed=1)


def accuracy(model: nn.Module, batch) -> dict:
    inputs, labels = batch
    return {"accuracy": (model(inputs).argmax(1) == labels).double().mean()}


def token_accuracy(model: nn.Module, batch) -> dict:
    ids, labels = batch
    counted = labels != IGNORED
    return {"accuracy": Loss(((model(ids).argmax(-1) == labels) & counted).sum(), counted.sum())}


KINDS = {
    "mean": make_workload(validation_data=HELD_OUT, metrics=accuracy),
    "tokens": make_workload(
        model=language_model,
        train_data=tokens(),
        loss=token_loss,
        validation_data=tokens(23, seed=1),
        metrics=token_accuracy,
    ),
}


def metrics_of(workload, micro_batch: int) -> dict[str, float | None]:
    return Validator(make_loop(workload, micro_batch=micro_batch)).run()


def by_hand(kind: str) -> dict[str, float]:
    """Compute the metrics sample by sample, in Python's floats."""
    workload = KINDS[kind]
    model = make_loop(workload).train_state.model.eval()
    losses, hits = [], []
    for inputs, labels in (workload.validation_data[index] for index in range(23)):
        out = model(inputs[None])[0].detach()
        for row, label in zip(
            out.reshape(-1, out.shape[-1]).tolist(), labels.reshape(-1).tolist(), strict=True
        ):
            if label != IGNORED:
                losses.append(math.log(sum(map(math.exp, row))) - row[label])
                hits.append(row.index(max(row)) == label)
    return {"loss": sum(losses) / len(losses), "accuracy": sum(hits) / len(hits)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch", [5, 23])
def test_metrics_are_those_of_each_sample_alone(kind: str, micro_batch: int) -> None:
    assert metrics_of(KINDS[kind], micro_batch) == pytest.approx(by_hand(kind), rel=1e-12)


def test_a_loss_over_the_whole_batch_is_left_out_with_a_note() -> None:
    workload = make_workload(loss=INFO_NCE, validation_data=HELD_OUT, metrics=accuracy)
    assert metrics_of(workload, 3) == {"accuracy": pytest.approx(by_hand("mean")["accuracy"])}
    (note,) = check_validation(make_loop(workload))
    assert "no held-out loss" in note


def test_a_metric_that_depends_on_the_micro_batch_is_named() -> None:
    def metrics(model: nn.Module, batch) -> dict:
        return {**accuracy(model, batch), "best": (model(batch[0]).argmax(1) == batch[1]).double().max()}

    workload = make_workload(validation_data=HELD_OUT, metrics=metrics)
    (note,) = check_validation(make_loop(workload))
    assert "'best' is no mean over samples" in note


def test_no_smaller_size_is_tried_on_a_lost_device() -> None:
    tried: list[int] = []

    def loss(model, batch):
        tried.append(len(batch[0]))
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="CUDA error"):
        metrics_of(make_workload(validation_data=HELD_OUT, loss=loss), 7)
    assert tried == [7]


def test_the_mode_of_each_module_is_restored() -> None:
    loop = make_loop(make_workload(validation_data=HELD_OUT))
    loop.train_state.model[1].eval()
    Validator(loop).run()
    assert [one.training for one in loop.train_state.model.modules()] == [True, True, False, True]
