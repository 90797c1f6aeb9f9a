"""The watch finds wrong losses that only real batches show, and leaves the run as it was."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autobatch.core.errors import InputError
from autobatch.training.loop_state import capture_loop
from autobatch.training.split_check import watch as watch_split
from autobatch.training.split_check.compare_modes import Finding
from autobatch.training.split_check.preflight import examine_loss
from autobatch.training.split_check.sample_choice import _candidates
from autobatch.training.split_check.watch import WATCHED_BATCHES, SplitWatch
from autobatch.workload.contract import Loss
from autobatch.workload.order import GlobalBatchSampler
from benchmarks.workloads import WORKLOADS
from tests.support.kinds import RUNS
from tests.support.split_losses import PAIRS
from tests.support.training import Rows, make_loop, make_setup, make_workload, mean_loss, network, points

STEPS = 12
NOTHING = Finding()


def watched(
    workload, *, micro_batch: int = 32, check: str = "error", before: Finding = NOTHING, **options: Any
):
    """Train under the watch; return the loop, its records and the notes."""
    options = {"target_batch": 96, "steps": STEPS, **options}
    loop = make_loop(workload, micro_batch=micro_batch, **options)
    setup = replace(make_setup(workload), model=loop.train_state.model)
    setup = replace(setup, precision=loop.train_state.precision, device=loop.device)
    notes: list[str] = []
    watch = SplitWatch(setup, check=check, note=notes.append, before=before)  # type: ignore[arg-type]
    return loop, list(watch.run(loop)), notes


CLASS_WEIGHTS = torch.tensor([1.0, 1.0, 9.0], dtype=torch.float64)
RARE_BATCH = 3


def rarely(values: Tensor, other: Any) -> Tensor:
    """Change a row that the fourth batch has, and that the check before training does not read."""
    sampler = GlobalBatchSampler(samples=len(values), target_batch=96, seed=0, steps=STEPS)
    read = _candidates(len(values), {})
    values[next(i for i in next(islice(sampler.batches(), RARE_BATCH, None)).ids if i not in read)] = other
    return values


def rare_classes() -> Rows:
    data = points(3000)
    return Rows(data.columns[0], rarely(data.columns[1] % 2, 2))


def class_weighted(model, batch):
    return cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS.to(batch[0].dtype))


def class_weighted_sum(model, batch):
    total = cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS.to(batch[0].dtype), reduction="sum")
    return Loss(total, CLASS_WEIGHTS[batch[1]].sum())


def rare_masks() -> Rows:
    data = points(3000)
    return Rows(*data.columns, rarely(torch.ones(3000, 4, dtype=torch.float64), torch.eye(4)[0].double()))


def masked(model, batch):
    errors = cross_entropy(model(batch[0]), batch[1], reduction="none")[:, None] * batch[2]
    return errors.sum() / batch[2].sum()


def masked_sum(model, batch):
    errors = cross_entropy(model(batch[0]), batch[1], reduction="none")[:, None] * batch[2]
    return Loss(errors.sum(), batch[2].sum())


def rare_nothing() -> Rows:
    data = points(3000)
    return Rows(data.columns[0], rarely(data.columns[1], -100))


def ignoring_sum(model, batch):
    return Loss(cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] != -100).sum())


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
    """Train on the 64 hardest samples, which are all samples of a small batch."""
    errors = cross_entropy(model(batch[0]), batch[1], reduction="none")
    return errors.topk(min(64, len(errors))).values.mean()


class Late(nn.Module):
    """A network with a scale that is 0 before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        return self.body(inputs)


def late(model, batch):
    """Weigh in a term over the whole batch as the scale grows."""
    scores = model(batch[0])
    term = 20 * scores.mean(0).square().sum() * model.scale.detach()
    return cross_entropy(scores, batch[1]) + term + (model.scale - 1) ** 2


def late_and_right(model, batch):
    scores = model(batch[0])
    term = scores.square().sum(1).mean() * model.scale.detach()
    return cross_entropy(scores, batch[1]) + term + (model.scale - 1) ** 2


MEAN, MIXED = "a mean over something else than samples", "several samples at once"
SLEEPERS: dict[str, tuple[Any, dict[str, Any], Any, Any, str]] = {
    "rare class": (rare_classes, {}, class_weighted, class_weighted_sum, MEAN),
    "rare mask": (rare_masks, {}, masked, masked_sum, MEAN),
    "rare ignored labels": (rare_nothing, {}, mean_loss, ignoring_sum, MEAN),
    "a term while training": (lambda: points(3000), {}, balanced, entropic, MIXED),
    "hardest samples of many": (lambda: points(3000), {}, hardest, mean_loss, MIXED),
    "a term that grows": (lambda: points(3000), {"model": Late}, late, late_and_right, MIXED),
}


@pytest.mark.parametrize("share", [0.1, 0.0], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", SLEEPERS)
def test_faults_that_the_check_before_training_cannot_see_are_found(kind: str, share, monkeypatch) -> None:
    monkeypatch.setattr("autobatch.training.split_check.compare_modes.FLOAT64_BUDGET_SHARE", share)
    data, fields, wrong, right, cause = SLEEPERS[kind]
    workload = make_workload(train_data=data(), loss=wrong, **fields)
    assert examine_loss(make_setup(workload), 32) == Finding()
    with pytest.raises(InputError, match=cause) as caught:
        watched(workload)
    assert "of the run). To train anyway, use --split-check note" in str(caught.value)
    assert "\n" not in str(caught.value)
    _, records, notes = watched(make_workload(train_data=data(), loss=right, **fields))
    assert (len(records), notes) == (STEPS, [])
    loop, records, notes = watched(workload, check="note")
    assert len(records) == loop.batches_seen == STEPS
    assert len(notes) == 1
    assert cause in notes[0]
    assert "--split-check" not in notes[0]


@pytest.mark.parametrize("kind", PAIRS)
def test_faults_that_the_check_before_training_sees_are_found_too(kind: str) -> None:
    fields, wrong, right, cause = PAIRS[kind]
    with pytest.raises(InputError, match=cause):
        watched(make_workload(**fields, loss=wrong), target_batch=24, micro_batch=7)
    assert watched(make_workload(**fields, loss=right), target_batch=24, micro_batch=7)[2] == []


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in sorted({*WORKLOADS} - {"contrastive", "gpt-checkpointed", "mlp-heavy"})),
        *(("gpt-ragged", one) for one in ("bf16", "fp16")),
        *(("resnet-bn", one) for one in ("bf16", "fp16")),
    ],
)
def test_models_of_many_kinds_give_no_alarm(name: str, precision: Any) -> None:
    options = {"target_batch": 12, "micro_batch": 4, "steps": 2, "precision": precision}
    assert watched(WORKLOADS[name](), **options)[2] == []


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("name", RUNS)
def test_the_watch_changes_no_bit_of_the_run(name: str) -> None:
    def build():
        workload, options = RUNS[name]()
        return workload, {"target_batch": 7, "micro_batch": 3, "steps": 4, **options}

    workload, options = build()
    loop, records, _ = watched(workload, check="note", **options)
    workload, options = build()
    plain = make_loop(workload, **options)
    expected = list(plain.run())
    assert [one.loss for one in records] == [one.loss for one in expected]
    assert equal(capture_loop(loop), capture_loop(plain))
    assert loop.train_state.model.training
    assert all(parameter.grad is None for parameter in loop.train_state.parameters)


def count_comparisons(monkeypatch) -> list[int]:
    """Record the samples of each comparison."""
    sizes: list[int] = []
    compare = watch_split.compare_samples

    def counted(setup, meter, samples, *rest):
        sizes.append(len(samples))
        return compare(setup, meter, samples, *rest)

    monkeypatch.setattr(watch_split, "compare_samples", counted)
    return sizes


def test_one_whole_batch_and_a_few_samples_of_the_first_batches_are_compared(monkeypatch) -> None:
    sizes = count_comparisons(monkeypatch)
    _, _, notes = watched(make_workload(train_data=points(3000)))
    assert (sizes, notes) == ([32, 32, 96, *[32] * (WATCHED_BATCHES - 2)], [])
    sizes.clear()
    watched(make_workload(train_data=points(3000)), steps=1)
    assert sizes == [32, 96], "the only batch is compared whole"


def test_batches_of_one_micro_batch_and_known_faults_are_not_compared(monkeypatch) -> None:
    sizes = count_comparisons(monkeypatch)
    watched(make_workload(train_data=points(300)), micro_batch=96)
    watched(make_workload(train_data=points(300)), before=Finding(fault="known"))
    assert sizes == []


def test_a_batch_that_memory_cannot_hold_is_compared_in_part(monkeypatch) -> None:
    def loss(model, batch):
        if len(batch[0]) > 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_loss(model, batch)

    _, records, (note,) = watched(make_workload(train_data=points(300), loss=loss))
    assert len(records) == STEPS
    assert note == (
        "compared a batch with its micro-batches on 48 of its 96 samples: more at once would take too much "
        "memory"
    )


@pytest.mark.parametrize("place", ["fetch", "collate_samples", "compare_samples"])
def test_memory_that_runs_out_in_a_comparison_does_not_end_the_run(place: str, monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for the copies")

    monkeypatch.setattr(watch_split, place, fail)
    loop, records, (note,) = watched(make_workload(train_data=points(300)))
    assert len(records) == STEPS
    assert "could not be checked: memory ran out: MemoryError: no memory for the copies. Make sure" in note
    monkeypatch.undo()
    expected = make_loop(make_workload(train_data=points(300)), micro_batch=32, target_batch=96, steps=STEPS)
    assert [one.loss for one in records] == [one.loss for one in expected.run()]
    assert equal(capture_loop(loop), capture_loop(expected))


def test_a_batch_that_time_does_not_allow_is_compared_in_part(monkeypatch) -> None:
    monkeypatch.setattr(watch_split, "SECONDS", 0.0)
    monkeypatch.setattr(watch_split, "TIME_SHARE", 0.0)
    sizes = count_comparisons(monkeypatch)
    _, records, (note,) = watched(make_workload(train_data=points(300)))
    assert len(records) == STEPS
    assert "on 32 of its 96 samples: more at once would take too much time" in note
    assert sizes == [32, 32], "later batches are not compared"


class Counting(nn.Module):
    """A network whose result depends on how often it ran in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.passes = network(), 0

    def forward(self, inputs):
        self.passes += self.training
        return self.body(inputs) * (1 + self.passes)


def test_what_cannot_be_compared_is_said_once() -> None:
    workload = make_workload(model=Counting, train_data=points(300))
    _, records, (note,) = watched(workload)
    assert len(records) == STEPS
    assert note.startswith("while training, whether the loss can be split into micro-batches exactly could")
    assert "keeps state between passes" in note
    assert watched(workload, before=Finding(unchecked="as known"))[2] == []


def test_a_collate_function_that_takes_a_micro_batch_at_most_ends_no_run() -> None:
    def at_most_32(samples):
        if len(samples) > 32:
            raise ValueError("at most 32 samples")
        return torch.utils.data.default_collate(samples)

    workload = make_workload(train_data=points(300), collate=at_most_32)
    assert examine_loss(make_setup(workload), 32) == NOTHING
    _, records, notes = watched(workload)
    assert len(records) == STEPS
    assert sum("at most 32 samples" in line for line in notes) == 1
