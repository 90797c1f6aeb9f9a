"""Workloads that users have reported: what is trained, what ends a run, and what is said of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, get_worker_info

import autobatch
from autobatch import Loss, Progress, StepRecord
from autobatch.core.records import Attempt
from tests.support.probes import Listener
from tests.support.runs import fit, fit_until
from tests.support.training import (
    Rows,
    apart,
    contrastive_loss,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    weights,
)

CPU: dict[str, Any] = {"device": "cpu", "memory_budget": "1GiB", "trials": 0, "progress": False}


class Stream(IterableDataset[Any]):
    """Stream of 100 samples that says another number."""

    def __init__(self, said: int) -> None:
        self.said = said
        self.rows = points(100)

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(100))


@pytest.mark.parametrize("said", [13, 100, 200])
def test_an_epoch_of_a_stream_has_the_samples_that_come(tmp_path: Path, said: int) -> None:
    result, notes = fit(make_workload(train_data=Stream(said)), tmp_path, target_batch=10, epochs=2)
    assert (result.training.samples, result.training.optimizer_steps) == (200, 20)
    told = [note for note in notes if re.search("length|__len__", note)]
    assert len(told) == (said != 100), notes
    assert all(re.search(rf"\b{said}\b", note) for note in told)


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


def test_a_metric_that_is_no_mean_is_told(tmp_path: Path) -> None:
    held_out = Rows(points(24, seed=5).columns[0], torch.arange(24) % 2)
    workload = make_workload(metrics=scores, validation_data=held_out)
    _, notes = fit(workload, tmp_path, target_batch=8, max_micro_batch=4, steps=2)
    for name in ("f1", "perplexity"):
        told = [note for note in notes if name in note and "Loss(total, count)" in note]
        assert any(len(re.findall(r"\d[\d.]*", note)) >= 2 for note in told), notes
    assert not any("accuracy" in note or "precision" in note for note in notes), notes


BUCKETS = [[8 * bucket + 2 * place + kind for place in range(4)] for bucket in range(3) for kind in range(2)]
"""Batches of 4 samples of one kind, as a sampler of buckets draws them."""


class Kinds:
    """Samples of two kinds in turn, of another length or of another task."""

    def __init__(self, *, is_ragged: bool) -> None:
        self.rows, self.is_ragged = points(24), is_ragged

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        inputs, label = self.rows[index]
        kind = index % 2
        return inputs.repeat(1 + kind) if self.is_ragged else inputs, label, kind


def of_one_kind(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels, kinds = batch
    assert len(set(kinds.tolist())) == 1, "a batch of two tasks"
    return cross_entropy(model(inputs[:, :5]) * (1 + kinds[0]), labels)


def plain_loop(workload: Any, batches: list[list[list[int]]]) -> nn.Module:
    """Train in float64, with one pass over each part of a batch, in equal shares."""
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    for parts in batches:
        optimizer.zero_grad()
        for ids in parts:
            batch = torch.utils.data.default_collate([workload.train_data[index] for index in ids])
            (workload.loss(model, batch) / len(parts)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("is_ragged", "target", "limit"), [(True, 8, 4), (True, 4, 2), (False, 4, 4), (False, 4, 2)]
)
def test_batches_of_one_kind_are_probed_and_trained_as_their_sampler_draws_them(
    tmp_path: Path, is_ragged: bool, target: int, limit: int
) -> None:
    workload = make_workload(train_data=Kinds(is_ragged=is_ragged), sampler=BUCKETS, loss=of_one_kind)
    result, notes = fit(workload, tmp_path, target_batch=target, max_micro_batch=limit, steps=3)
    each = target // 4
    torch.manual_seed(0)
    expected = plain_loop(workload, [BUCKETS[each * step : each * step + each] for step in range(3)])
    assert apart(weights(result.model), weights(expected)) < 1e-12
    if target == 4:  # otherwise a whole batch has two kinds, which nothing can be compared with
        assert not any("checked" in note for note in notes), notes


class Failing(Progress):
    """Listener that lets memory run out from a step on."""

    fails = False

    def stepped(self, step: StepRecord, of: int) -> None:
        self.fails = True


def test_a_multiple_that_no_longer_fits_ends_a_run(tmp_path: Path) -> None:
    listener, failures = Failing(), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if listener.fails and len(batch[0]) > 4:
            failures.append(1)
            assert len(failures) < 50, "the same micro-batch runs again and again"
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return mean_loss(model, batch)

    options = {**CPU, "micro_batch_multiple": 8, "max_micro_batch": 8, "progress": listener}
    with pytest.raises(autobatch.DoesNotFitError):
        autobatch.fit(make_workload(loss=loss), out=tmp_path, target_batch=16, steps=3, **options)


RAN = "a micro-batch ran"


class Ordered(Listener):
    """Listener that keeps remarks, and what has run before them."""

    def attempted(self, attempt: Attempt) -> None:
        self.notes.append(RAN)


def test_data_shorter_than_a_batch_are_told_before_anything_runs(tmp_path: Path) -> None:
    listener = Ordered()
    workload, options = make_workload(train_data=points(9)), {**CPU, "progress": listener}
    try:
        result = autobatch.fit(workload, out=tmp_path, target_batch=16, steps=3, **options)
        assert result.training.samples == 48
    except autobatch.InputError as error:
        listener.notes.append(str(error))
    told = listener.notes[: [*listener.notes, RAN].index(RAN)]
    assert any("9" in note and "16" in note for note in told), listener.notes


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def shortened(gradient: Tensor) -> Tensor:
    """Clip by the norm over all samples of a micro-batch; sample by sample, a clip is exact here."""
    return gradient * (1e-3 / gradient.norm()).clamp(max=1.0)


def with_hooks(where: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if where == "parameter":
        for parameter in model.parameters():
            parameter.register_hook(clamped)
    else:
        model[2].register_full_backward_hook(lambda _, gradients, __: tuple(map(shortened, gradients)))
    return model


def said_of(workload: Any, out: Path) -> str:
    """Return the remarks of a run, and the error that ended it."""
    listener = Listener()
    options = {**CPU, "max_micro_batch": 4, "progress": listener}
    try:
        autobatch.fit(workload, out=out, target_batch=8, steps=2, **options)
    except autobatch.InputError as error:
        listener.note(str(error))
    return "\n".join(listener.notes)


@pytest.mark.parametrize("where", ["parameter", "module"])
def test_a_hook_that_clips_gradients_is_told_as_such(tmp_path: Path, where: str) -> None:
    assert "hook" in said_of(make_workload(model=partial(with_hooks, where)), tmp_path)


def test_a_loss_that_depends_on_several_samples_is_not_told_as_a_hook(tmp_path: Path) -> None:
    said = said_of(make_workload(loss=contrastive_loss), tmp_path)
    assert "several samples" in said
    assert "hook" not in said


class Unshared(IterableDataset[Any]):
    """Stream that yields all of its samples in each loader process."""

    def __init__(self) -> None:
        self.rows = points(24)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(24))


@pytest.mark.program  # torch waits ten seconds for loader processes whose reader has failed
def test_loader_processes_that_yield_the_same_samples_are_told(tmp_path: Path) -> None:
    """Otherwise an epoch of 24 samples has each of the first 12 twice, and none of the others."""
    with pytest.raises(autobatch.InputError, match="each of 2 loader processes"):
        fit(make_workload(train_data=Unshared()), tmp_path, target_batch=8, steps=3, workers=2)


def whole_compiled() -> nn.Module:
    return torch.compile(network(), backend="eager")


def layer_compiled() -> nn.Module:
    model = network()
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.parametrize("compiled", [whole_compiled, layer_compiled])
def test_the_weights_of_a_compiled_model_load_into_the_model(tmp_path: Path, compiled: Any) -> None:
    result, _ = fit(
        make_workload(model=compiled), tmp_path, target_batch=8, max_micro_batch=3, steps=2, ema=0.5
    )
    for name in ("model", "model-ema"):
        loaded = network()
        loaded.load_state_dict(load_file(tmp_path / f"{name}.safetensors"))
        assert torch.equal(weights(loaded), weights(result.model)) == (name == "model")


def force(model: nn.Module, positions: Tensor) -> Tensor:
    """Return the force of an energy at some positions, also where gradients are off."""
    with torch.enable_grad():
        positions = positions.clone().requires_grad_()
        return -torch.autograd.grad(model(positions).sum(), positions, create_graph=True)[0]


def force_loss(model: nn.Module, batch: Any) -> Tensor:
    return (force(model, batch[0]) - batch[0]).square().mean()


def force_error(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"error": (force(model, batch[0]) - batch[0]).abs().mean()}


def test_a_loss_and_a_metric_may_take_gradients_also_in_validation(tmp_path: Path) -> None:
    held_out = points(9, seed=5)
    workload = make_workload(
        loss=force_loss, metrics=force_error, validation_data=held_out, sampler=list(range(24))
    )
    result, _ = fit(workload, tmp_path, target_batch=8, max_micro_batch=3, steps=3)
    torch.manual_seed(0)
    expected = plain_loop(workload, [[list(range(8 * step, 8 * step + 8))] for step in range(3)])
    assert apart(weights(result.model), weights(expected)) < 1e-12
    figures = {"loss": force_loss(expected, held_out.columns), **force_error(expected, held_out.columns)}
    assert result.training.validation == pytest.approx({name: one.item() for name, one in figures.items()})


class Quantized(nn.Module):
    """Model whose codebook follows its inputs in each forward pass, as a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer("codes", torch.randn(4, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.encode(inputs)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        codes = self.codes.clone()
        if self.training:
            for code in nearest.unique():
                moved = hidden[nearest == code].detach().mean(0)
                self.codes[code] = 0.9 * codes[code] + 0.1 * moved
        return self.decode(hidden + (codes[nearest] - hidden).detach())


def test_a_codebook_that_moves_in_each_micro_batch_is_told(tmp_path: Path) -> None:
    workload = make_workload(model=lambda: Quantized().double())
    said = said_of(workload, tmp_path)
    assert "writes codes, and micro-batches see each other through it" in said


class Shuffled(IterableDataset[Any]):
    """Stream in another order in each epoch, shared by loader processes, with draws of its own."""

    epoch = 0

    def __init__(self) -> None:
        self.rows = points(24)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        process = get_worker_info()
        for index in order if process is None else order[process.id :: process.num_workers]:
            inputs, label = self.rows[index]
            yield inputs + torch.randn(5, dtype=torch.float64), label


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.program)])
def test_epochs_of_a_stream_are_whole_after_a_resume_within_one(tmp_path: Path, workers: int) -> None:
    options = {"target_batch": 8, "max_micro_batch": 3, "steps": 9, "workers": workers}
    workload = make_workload(train_data=Shuffled())
    whole, _ = fit(workload, tmp_path / "whole", **options)
    fit_until(5, workload, tmp_path / "parts", checkpoint_every=2, **options)
    parts, _ = fit(workload, tmp_path / "parts", resume=True, **options)
    assert torch.equal(weights(parts.model), weights(whole.model))


def with_few_objects(form: str, samples: int, objects: list[int]) -> Any:
    """Return a workload of pictures, few of which have an object; the loss of the others is a constant."""
    has_object = torch.zeros(samples, dtype=torch.bool)
    has_object[objects] = True

    def loss(model: nn.Module, batch: Any) -> Tensor | Loss:
        inputs, labels, mine = batch
        zero = torch.tensor(0.0, dtype=torch.float64)
        total = cross_entropy(model(inputs)[mine], labels[mine], reduction="sum") if mine.any() else zero
        return Loss(total, mine.sum()) if form == "counted" else total / len(mine)

    data = Rows(*points(samples).columns, has_object)
    return make_workload(train_data=data, loss=loss, sampler=list(range(samples)))


@pytest.mark.parametrize("form", ["counted", "mean"])
def test_a_micro_batch_without_an_object_adds_nothing(tmp_path: Path, form: str) -> None:
    workload = with_few_objects(form, 24, [3, 9, 17])
    result, _ = fit(workload, tmp_path, target_batch=8, max_micro_batch=3, steps=3)

    def whole(model: nn.Module, batch: Any) -> Tensor:
        found = workload.loss(model, batch)
        return found.total / found.count if form == "counted" else found

    expected, _ = reference(workload, [range(8 * step, 8 * step + 8) for step in range(3)], whole)
    assert apart(weights(result.model), expected) < 1e-12


def test_a_limit_is_that_of_samples_that_are_trained_on() -> None:
    limits = []
    for objects in ([0], [900]):
        workload = with_few_objects("counted", 1000, objects)
        found = autobatch.probe(workload, device="cpu", memory_budget="64KiB", progress=False)
        limits.append(found.probe.micro_batch)
    assert limits[0] == limits[1]
