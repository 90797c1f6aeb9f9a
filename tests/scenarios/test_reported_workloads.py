"""Workloads that users have reported: what is trained, what ends a run, and what is said of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autobatch import Loss
from tests.support.runs import fit
from tests.support.training import (
    Rows,
    apart,
    make_workload,
    network,
    points,
    reference,
    weights,
)

RUN: dict[str, Any] = {"target_batch": 8, "max_micro_batch": 3, "steps": 3}
IN_ORDER = [list(range(8 * step, 8 * step + 8)) for step in range(3)]
"""Batches of the samples in their order."""


# Batches of one kind, as a sampler of buckets draws them

BUCKETS = [[8 * bucket + 2 * place + kind for place in range(4)] for bucket in range(3) for kind in range(2)]


def of_two_kinds(*, is_ragged: bool) -> list[tuple[Tensor, Tensor, int]]:
    """Make samples of two kinds in turn, of another length or of another task."""
    return [
        (inputs.repeat(1 + index % 2) if is_ragged else inputs, label, index % 2)
        for index, (inputs, label) in enumerate(points(24))
    ]


def of_any_kind(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels, kinds = batch
    return cross_entropy(model(inputs[:, :5]) * (1 + kinds[:, None]), labels)


def of_one_kind(model: nn.Module, batch: Any) -> Tensor:
    kinds = batch[2]
    assert len(set(kinds.tolist())) == 1, "a batch of two tasks"
    return of_any_kind(model, batch)


@pytest.mark.parametrize(("is_ragged", "target", "limit"), [(True, 8, 4), (True, 4, 2), (False, 4, 2)])
def test_batches_of_one_kind_are_probed_and_trained_as_their_sampler_draws_them(
    tmp_path: Path, is_ragged: bool, target: int, limit: int
) -> None:
    workload = make_workload(train_data=of_two_kinds(is_ragged=is_ragged), sampler=BUCKETS, loss=of_one_kind)
    result, notes = fit(workload, tmp_path, target_batch=target, max_micro_batch=limit, steps=3)
    order = [index for bucket in BUCKETS for index in bucket]
    plain = make_workload(train_data=of_two_kinds(is_ragged=False))
    batches = [order[target * step : target * step + target] for step in range(3)]
    assert apart(weights(result.model), reference(plain, batches, of_any_kind)[0]) < 1e-12
    if target == 4:  # otherwise a whole batch has two kinds, which nothing can be compared with
        assert not any("checked" in note for note in notes), notes


# What is said


def scores(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return scores of a classifier that says 0 to all samples; the last two are means over something."""
    inputs, labels = batch
    is_zero = labels == 0
    return {
        "f1": 2 * is_zero.sum() / (len(labels) + is_zero.sum()),
        "perplexity": cross_entropy(model(inputs), labels).exp(),
        "accuracy": is_zero.double().mean(),
        "precision": Loss(is_zero.sum().double(), len(labels)),
    }


def test_metrics_that_are_no_means_are_told_with_their_figures(tmp_path: Path) -> None:
    held_out = Rows(points(24, seed=5).columns[0], torch.arange(24) % 2)
    _, notes = fit(make_workload(metrics=scores, validation_data=held_out), tmp_path, **RUN)
    told = "\n".join(notes)
    assert re.search(r"'f1'.* \d[\d.]* .* \d[\d.]* .*Loss\(total, count\)(.|\n)*'perplexity'", told), told
    assert not re.search("accuracy|precision", told), told


def test_data_shorter_than_a_batch_are_told(tmp_path: Path) -> None:
    result, notes = fit(make_workload(train_data=points(9)), tmp_path, target_batch=16, steps=3)
    assert result.training.samples == 48
    assert any("9" in note and "16" in note for note in notes), notes


# What is trained, and what is written


@pytest.mark.parametrize("part", [None, 0])
def test_the_weights_of_a_compiled_model_load_into_the_model(tmp_path: Path, part: int | None) -> None:
    def compiled() -> nn.Module:
        model = network()
        if part is None:
            return torch.compile(model, backend="eager")  # type: ignore[return-value]
        model[part] = torch.compile(model[part], backend="eager")
        return model

    result, _ = fit(make_workload(model=compiled), tmp_path, ema=0.5, **RUN)
    for name in ("model", "model-ema"):
        loaded = network()
        loaded.load_state_dict(load_file(tmp_path / f"{name}.safetensors"))
        assert torch.equal(weights(loaded), weights(result.model)) == (name == "model")


def force(model: nn.Module, positions: Tensor) -> Tensor:
    """Return the force of an energy at some positions, also where gradients are off."""
    with torch.enable_grad():
        positions = positions.clone().requires_grad_()
        return -torch.autograd.grad(model(positions).sum(), positions, create_graph=True)[0]


def force_errors(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    off = force(model, batch[0]) - batch[0]
    return {"square": off.square().mean(), "absolute": off.abs().mean()}


def test_a_loss_and_a_metric_may_take_gradients_also_in_validation(tmp_path: Path) -> None:
    held_out = points(9, seed=5)
    workload = make_workload(
        loss=lambda model, batch: force_errors(model, batch)["square"],
        metrics=force_errors,
        validation_data=held_out,
        sampler=list(range(24)),
    )
    result, _ = fit(workload, tmp_path, **RUN)
    assert apart(weights(result.model), reference(workload, IN_ORDER, workload.loss)[0]) < 1e-12
    errors = {name: each.item() for name, each in force_errors(result.model, held_out.columns).items()}
    assert result.training.validation == pytest.approx({"loss": errors["square"], **errors})


def with_few_objects(samples: int, objects: list[int], *, is_mean: bool = False) -> Any:
    """Return a workload of pictures, few of which have an object; the loss of the others is a constant."""
    has_object = torch.zeros(samples, dtype=torch.bool)
    has_object[objects] = True

    def loss(model: nn.Module, batch: Any) -> Tensor | Loss:
        inputs, labels, mine = batch
        total = torch.tensor(0.0, dtype=torch.float64)
        if mine.any():
            total = cross_entropy(model(inputs)[mine], labels[mine], reduction="sum")
        return total / len(mine) if is_mean else Loss(total, mine.sum())

    data = Rows(*points(samples).columns, has_object)
    return make_workload(
        train_data=data, loss=loss, sampler=list(range(samples)), size_of=lambda sample: float(sample[2])
    )


@pytest.mark.parametrize("is_mean", [False, True])
def test_a_micro_batch_without_an_object_adds_nothing(tmp_path: Path, is_mean: bool) -> None:
    workload = with_few_objects(24, [3, 9, 17], is_mean=is_mean)
    result, _ = fit(workload, tmp_path, **RUN)

    def whole(model: nn.Module, batch: Any) -> Tensor:
        loss = workload.loss(model, batch)
        return loss if is_mean else loss.total / loss.count

    expected, _ = reference(workload, IN_ORDER, whole)
    assert apart(weights(result.model), expected) < 1e-12
