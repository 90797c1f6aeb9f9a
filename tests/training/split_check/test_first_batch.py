"""The first batch is compared with its micro-batches, and the run is what it would be without that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from autobatch import InputError, Loss
from autobatch.training.resume import capture_loop
from autobatch.training.split_check import check as checks
from autobatch.training.split_check.check import FirstBatch
from autobatch.training.split_check.compare import Finding
from benchmarks.workloads import WORKLOADS
from tests.support.kinds import RUNS
from tests.support.split_losses import examined
from tests.support.training import Rows, make_loop, make_setup, make_workload, mean_loss, points

STEPS = 3


def trained(
    workload, *, micro_batch: int = 32, check: Any = "error", before: Finding | None = None, **options
):
    """Train with the check; return the loop, its records and the notes."""
    loop = make_loop(workload, **{"target_batch": 96, "steps": STEPS, "micro_batch": micro_batch, **options})
    setup = replace(make_setup(workload), model=loop.train_state.model, device=loop.device)
    setup = replace(setup, precision=loop.train_state.precision)
    notes: list[str] = []
    first = FirstBatch(setup, check=check, note=notes.append, before=before or Finding())
    return loop, list(first.run(loop)), notes


def balanced(model, batch):
    """Add the load-balancing term of a mixture of experts, which is a product of batch means."""
    scores = model(batch[0])
    shares = scores.softmax(1).mean(0)
    return cross_entropy(scores, batch[1]) + model.training * shares.square().sum()


def entropic(model, batch):
    """Add a term to each sample while training."""
    scores = model(batch[0])
    return cross_entropy(scores, batch[1]) + model.training * scores.softmax(1).square().sum(1).mean()


def hardest(model, batch):
    """Train on the 80 hardest samples, which are all samples of a small batch."""
    errors = cross_entropy(model(batch[0]), batch[1], reduction="none")
    return errors.topk(min(80, len(errors))).values.mean()


def one_rare_label() -> Rows:
    """Return points of which the first batch has one that the check before training does not read."""
    data = points(3000)
    labels = data.columns[1] % 2
    loop = make_loop(make_workload(train_data=data), target_batch=96, steps=STEPS)
    read = set(checks.SampleChoice(make_setup(make_workload(train_data=data))).ids(256))
    labels[next(i for i in next(loop.sampler.batches()).ids if i not in read)] = -100
    return Rows(data.columns[0], labels)


def ignoring_sum(model, batch):
    return Loss(cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] != -100).sum())


MEAN, MIXED = "a mean over something else than samples", "several samples at once"
SLEEPERS: dict[str, tuple[Any, Any, Any, str]] = {
    "rare ignored label": (one_rare_label, mean_loss, ignoring_sum, MEAN),
    "a term while training": (lambda: points(3000), balanced, entropic, MIXED),
    "hardest samples of many": (lambda: points(3000), hardest, mean_loss, MIXED),
}


@pytest.mark.parametrize("kind", SLEEPERS)
def test_faults_that_the_check_before_training_cannot_see_are_found(kind: str) -> None:
    data, wrong, right, cause = SLEEPERS[kind]
    workload = make_workload(train_data=data(), loss=wrong)
    assert examined(make_setup(workload), 32) == Finding()
    with pytest.raises(InputError, match=cause) as caught:
        trained(workload)
    assert "(found in the first batch of the run). To train anyway" in str(caught.value)
    assert "\n" not in str(caught.value)
    _, records, notes = trained(make_workload(train_data=data(), loss=right))
    assert (len(records), notes) == (STEPS, [])
    loop, records, (note,) = trained(workload, check="note")
    assert len(records) == loop.batches_seen == STEPS
    assert cause in note
    assert "--split-check" not in note


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in sorted({*WORKLOADS} - {"contrastive", "gpt-checkpointed", "mlp-heavy"})),
        ("gpt-ragged", "bf16"),
        ("resnet-bn", "fp16"),
    ],
)
def test_models_of_many_kinds_give_no_alarm(name: str, precision: Any) -> None:
    options = {"target_batch": 12, "micro_batch": 4, "steps": 1, "precision": precision}
    assert examined(make_setup(WORKLOADS[name]()), 16) == Finding()
    assert trained(WORKLOADS[name](), **options)[2] == []


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("name", RUNS)
def test_the_check_changes_no_bit_of_the_run(name: str) -> None:
    def build():
        workload, options = RUNS[name]()
        return workload, {"target_batch": 7, "micro_batch": 3, "steps": 4, **options}

    workload, options = build()
    loop, records, _ = trained(workload, check="note", **options)
    workload, options = build()
    plain = make_loop(workload, **options)
    expected = list(plain.run())
    assert [one.loss for one in records] == [one.loss for one in expected]
    assert equal(capture_loop(loop), capture_loop(plain))
    assert loop.train_state.model.training
    assert all(parameter.grad is None for parameter in loop.train_state.parameters)


@pytest.fixture
def compared(monkeypatch) -> list[list[int]]:
    """Record the sizes of the parts of each comparison."""
    found: list[list[int]] = []

    def counted(whole, sizes):
        found.append(list(sizes))
        return cut_split(whole, sizes)

    cut_split = checks.cut_split
    monkeypatch.setattr(checks, "cut_split", counted)
    return found


def test_a_batch_that_memory_or_time_cannot_hold_is_compared_in_part(compared, monkeypatch) -> None:
    def loss(model, batch):
        if len(batch[0]) > 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_loss(model, batch)

    _, records, notes = trained(make_workload(train_data=points(300), loss=loss))
    assert (len(records), notes) == (STEPS, [])
    assert [sum(sizes) for sizes in compared] == [96, 48]
    compared.clear()
    monkeypatch.setattr(checks, "SECONDS", 0.0)
    trained(make_workload(train_data=points(300)))
    assert [sum(sizes) for sizes in compared] == [8]


def test_memory_that_is_never_enough_ends_no_run(compared) -> None:
    def loss(model, batch):
        if compared:  # after the step
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_loss(model, batch)

    _, records, notes = trained(make_workload(train_data=points(300), loss=loss), steps=1)
    assert (len(records), notes) == (1, [])
    assert [sum(sizes) for sizes in compared] == [96, 48, 24, 12, 6, 3]


def test_what_cannot_be_compared_is_said_once() -> None:
    passes = [0]

    def loss(model, batch):
        passes[0] += model.training
        return mean_loss(model, batch) * passes[0]

    workload = make_workload(train_data=points(300), loss=loss)
    _, records, (note,) = trained(workload)
    assert len(records) == STEPS
    assert note.startswith("while training, whether the loss can be split into micro-batches exactly could")
    assert "keeps state between passes" in note
    assert trained(workload, before=Finding(unchecked="as known"))[2] == []


def test_ragged_micro_batches_are_compared_where_their_forms_are_equal(compared) -> None:
    lengths = [3, 3, 3, 3, 5, 5, 5, 5, 5, 5, 4, 4]
    data = [(torch.ones(length, dtype=torch.float64), torch.tensor(0)) for length in lengths]

    def collate(samples):
        rows, labels = zip(*samples, strict=True)
        padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        return torch.nn.functional.pad(padded, (0, 0))[:, :, None].expand(-1, -1, 5), torch.stack(labels)

    def loss(model, batch):
        return model(batch[0]).square().mean((1, 2)).mean()

    workload = make_workload(train_data=data, collate=collate, loss=loss)
    trained(workload, target_batch=12, micro_batch=2, check="note", steps=1)
    assert len(compared) == 1
    assert set(compared[0]) == {2}
