"""Workloads that users have reported: what is trained, what ends a run, and what is said of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

import autobatch
from autobatch import Loss, Progress, StepRecord
from autobatch.core.options import Options
from autobatch.core.records import Attempt
from autobatch.rehearsal.process import ChildCrashed, ChildProcess
from autobatch.rehearsal.setup import Role
from autobatch.training.build import count_stream
from autobatch.training.split_check.check import examine
from autobatch.training.split_check.compare import Finding
from tests.support.commandline import SMALL
from tests.support.noted import Noting, fit, known
from tests.support.training import (
    Rows,
    apart,
    contrastive_loss,
    make_workload,
    mean_loss,
    points,
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


@known("run: a stream is believed how many samples it has")
@pytest.mark.parametrize("said", [13, 200])
def test_an_epoch_of_a_stream_has_the_samples_that_come(tmp_path: Path, said: int) -> None:
    result, notes = fit(make_workload(train_data=Stream(said)), tmp_path, target_batch=10, epochs=2)
    assert result.training.samples == 200
    assert result.training.optimizer_steps == 20
    assert len([note for note in notes if re.search(rf"(length|__len__).*\b{said}\b", note)]) == 1, notes


def test_a_stream_that_says_how_many_samples_it_has_is_left_alone(tmp_path: Path) -> None:
    result, notes = fit(make_workload(train_data=Stream(100)), tmp_path, target_batch=10, epochs=2)
    assert result.training.samples == 200
    assert not any(re.search("length|__len__", note) for note in notes), notes


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


def scored() -> Any:
    inputs = points(24, seed=5).columns[0]
    return make_workload(metrics=scores, validation_data=Rows(inputs, torch.arange(24) % 2))


@known("run: a metric that is no mean over samples is averaged over micro-batches without a word")
@pytest.mark.parametrize("name", ["f1", "perplexity"])
def test_a_metric_that_is_no_mean_is_told(tmp_path: Path, name: str) -> None:
    _, notes = fit(scored(), tmp_path, target_batch=8, max_micro_batch=4, steps=2)
    told = [note for note in notes if name in note and "Loss(total, count)" in note]
    assert any(len(re.findall(r"\d[\d.]*", note)) >= 2 for note in told), notes


def test_a_metric_that_is_a_mean_is_left_alone(tmp_path: Path) -> None:
    _, notes = fit(scored(), tmp_path, target_batch=8, max_micro_batch=4, steps=2)
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


def bucketed(*, is_ragged: bool) -> Any:
    return make_workload(train_data=Kinds(is_ragged=is_ragged), sampler=BUCKETS, loss=of_one_kind)


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


UNLIKE = known(
    "run: samples are probed and compared that the sampler of the workload never puts in one batch"
)


@pytest.mark.parametrize(
    ("is_ragged", "target", "limit"),
    [
        *(pytest.param(True, *sizes, marks=UNLIKE) for sizes in [(4, 4), (8, 4), (4, 2)]),
        *(pytest.param(False, *sizes, marks=UNLIKE) for sizes in [(4, 4), (4, 2)]),
        (False, 8, 4),
    ],
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


@known("run: a multiple that no longer fits runs again and again, because it is no smaller than before")
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


class Ordered(Noting):
    """Listener that keeps remarks, and what has run before them."""

    def attempted(self, attempt: Attempt) -> None:
        self.notes.append(RAN)


@known("run: data shorter than a batch are told after the probe")
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


@known("run: a run whose batches are all dropped divides by zero")
def test_a_run_without_any_whole_batch_is_no_bug_of_autobatch(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with InputError"):
        fit(make_workload(train_data=points(9)), tmp_path, target_batch=16, steps=3, last_batch="drop")


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def with_hooks(where: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if where == "parameter":
        for parameter in model.parameters():
            parameter.register_hook(clamped)
    else:
        model[2].register_full_backward_hook(lambda _, gradients, __: tuple(map(clamped, gradients)))
    return model


def said_of(workload: Any, out: Path) -> str:
    """Return the remarks of a run, and the error that ended it."""
    listener = Noting()
    options = {**CPU, "max_micro_batch": 4, "progress": listener}
    try:
        autobatch.fit(workload, out=out, target_batch=8, steps=2, **options)
    except autobatch.InputError as error:
        listener.note(str(error))
    return "\n".join(listener.notes)


@known("run: a hook that clips gradients is told as a loss that depends on several samples at once")
@pytest.mark.parametrize("where", ["parameter", "module"])
def test_a_hook_that_clips_gradients_is_told_as_such(tmp_path: Path, where: str) -> None:
    assert "hook" in said_of(make_workload(model=partial(with_hooks, where)), tmp_path)


def test_a_loss_that_depends_on_several_samples_is_not_told_as_a_hook(tmp_path: Path) -> None:
    said = said_of(make_workload(loss=contrastive_loss), tmp_path)
    assert "several samples" in said
    assert "hook" not in said


SLOW = f"""{SMALL}
import time
from torch.utils.data import IterableDataset
from autobatch.rehearsal import process
process.SIGN_SECONDS = 0.0

class Slow(IterableDataset):
    def __iter__(self):
        for index, row in enumerate(data(270)):
            time.sleep(0.25 if index > 257 else 0.0)  # a child looks at 256 samples when it opens
            yield row

def stream():
    return small(train_data=Slow())

def slow(model, batch):
    time.sleep(0.15)
    return loss(model, batch)

def of_slow_loss():
    return small(loss=slow)
"""


@pytest.mark.usefixtures("warm_children")
@known("run: a child that counts a stream or checks a loss for long counts as hanging")
@pytest.mark.parametrize(
    ("function", "call", "arguments"), [("stream", count_stream, ()), ("of_slow_loss", examine, (4, 2))]
)
def test_a_call_of_a_child_that_gets_further_may_take_any_time(
    tmp_path: Path, function: str, call: Any, arguments: tuple[int, ...]
) -> None:
    (tmp_path / "slow_parts.py").write_text(SLOW)
    options = Options().with_values(device="cpu", memory_budget="64MiB")
    with ChildProcess() as process:
        process.open(f"{tmp_path / 'slow_parts.py'}:{function}", options, Role())
        process.answer_seconds = 2.0
        try:
            found = process.call("a long call", call, *arguments)
        except ChildCrashed as error:
            raise AssertionError(f"the child was ended: {error}") from error
    assert found == (270 if function == "stream" else Finding())
