"""Validation metrics are independent of the micro-batch, and survive out-of-memory errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autobatch import DoesNotFitError, InputError, Loss
from autobatch.training.validation import Validator
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import sharded_loop
from tests.support.training import (
    IGNORED,
    INFO_NCE,
    language_model,
    make_loop,
    make_workload,
    mean_loss,
    network,
    points,
    token_loss,
    tokens,
)

HELD_OUT = points(23, seed=1)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


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


def metrics_of(workload, micro_batch: int, target_batch: int = 24) -> dict[str, float | None]:
    return Validator(make_loop(workload, target_batch=target_batch, micro_batch=micro_batch)).run()


def limited(limit: int, seen: list[int], error: Exception = FULL):
    """Make a loss that fails for more samples."""

    def loss(model, batch):
        seen.append(len(batch[0]))
        if len(batch[0]) > limit:
            raise error.with_traceback(None)
        return mean_loss(model, batch)

    return loss


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


def test_a_loss_over_the_whole_batch_is_computed_over_batches_of_the_training_size() -> None:
    """The loss over fewer samples, such as a micro-batch, has another value."""
    model, total = make_loop(make_workload()).train_state.model, 0.0
    for ids in (range(10), range(10, 20), range(20, 23)):
        batch = torch.utils.data.default_collate([HELD_OUT[index] for index in ids])
        total += float(INFO_NCE(model, batch).detach()) * len(ids)
    workload = make_workload(loss=INFO_NCE, validation_data=HELD_OUT)
    assert metrics_of(workload, 3, target_batch=10) == {"loss": pytest.approx(total / 23, rel=1e-12)}


def test_a_micro_batch_that_failed_is_not_tried_again() -> None:
    seen: list[int] = []
    data = points(60, seed=1)
    expected = metrics_of(make_workload(validation_data=data), 60)
    workload = make_workload(validation_data=data, loss=limited(5, seen))
    found = Validator(make_loop(workload, micro_batch=16))
    for expected_sizes in ([16, 8, *[4] * 15], [4] * 15):
        assert found.run() == pytest.approx(expected, rel=1e-12), "no sample counts twice"
        assert seen == expected_sizes
        seen.clear()


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (6, LOST, "illegal memory access"),  # nothing runs after it, so no smaller size is tried
        (0, FULL, "in validation at a micro-batch of 1: .* Free memory"),
    ],
)
def test_an_error_that_no_smaller_size_avoids_is_raised(limit: int, error, message: str) -> None:
    loop = make_loop(make_workload(validation_data=HELD_OUT, loss=limited(limit, [], error)), micro_batch=7)
    with pytest.raises((DoesNotFitError, RuntimeError), match=message):
        Validator(loop).run()


def test_each_mode_is_restored_and_weights_are_unchanged() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5), network(), nn.Dropout(0.5)).double()

    loop = make_loop(make_workload(model=build, validation_data=points(9)))
    model = loop.train_state.model.train()
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Validator(loop).run()
    assert [module.training for module in (model, *model)] == [True, False, True, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_an_invalid_count_is_named() -> None:
    def wrong(model, batch):
        return {"share": Loss(mean_loss(model, batch), math.nan)}

    with pytest.raises(InputError, match="count of the validation metric 'share'"):
        metrics_of(make_workload(validation_data=points(9), metrics=wrong), 4)


def workload_of(samples: int):
    return make_workload(model=network, validation_data=points(samples, seed=5))


def validate(samples: int, micro_batch: int) -> tuple[float | None, bool]:
    """Return the loss over all ranks, and whether the model is in parts again."""
    group = open_group()
    loop = sharded_loop(group, workload_of(samples))
    loop.micro_batch = micro_batch
    found = Validator(loop).run()
    in_parts = all(hasattr(p, "to_local") for p in loop.train_state.model.parameters())
    group.close()
    return found["loss"], in_parts


@pytest.mark.distributed
# One rank has more samples than the other, or all of them.
@pytest.mark.parametrize(("samples", "micro_batch"), [(7, 2), (1, 2)])
def test_the_loss_is_that_of_one_process(server: RankServer, samples: int, micro_batch: int) -> None:
    expected = metrics_of(workload_of(samples), 8)["loss"]
    for loss, in_parts in server.values(validate, samples, micro_batch):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert in_parts
