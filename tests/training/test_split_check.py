"""The check tells losses that can be split from those that cannot, and names the likely cause."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from autobatch import InputError, Loss, WholeBatchLoss
from autobatch.training.split_check import check_loss_splits, examine, first_samples
from autobatch.workload.order import GlobalBatchSampler
from benchmarks.workloads import WORKLOADS
from tests.support.kinds import RUNS
from tests.support.split_losses import PAIRS, examined
from tests.support.training import (
    INFO_NCE,
    Rows,
    contrastive_loss,
    make_loop,
    make_setup,
    make_workload,
    mean_loss,
    network,
    points,
    weights,
)


def check(
    workload,
    *,
    micro_batch: int = 8,
    target_batch: int = 24,
    budget: str = "1GiB",
    precision: str = "fp32",
    **options,
):
    sampler = GlobalBatchSampler(
        samples=len(workload.train_data), target_batch=target_batch, seed=0, **{"steps": 3, **options}
    )
    setup = make_setup(workload, budget, precision=precision)
    return check_loss_splits(setup, micro_batch=micro_batch, sampler=sampler)


def batch_penalty(model, batch):
    return mean_loss(model, batch) + model(batch[0]).mean(0).norm()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": lambda: network(torch.float32), "train_data": points(dtype=torch.float32)},
        {"model": lambda: nn.Sequential(network(), nn.Dropout(0.5)).double()},
        {"model": lambda: network(torch.bfloat16), "train_data": points(dtype=torch.bfloat16)},
    ],
    ids=["mean", "fp32", "dropout", "bf16"],
)
@pytest.mark.parametrize("budget", ["1GiB", "4KiB"])
def test_losses_that_can_be_split_give_no_note(changes, budget: str) -> None:
    assert check(make_workload(**changes), budget=budget) == []


def standardised(model, batch):
    """Return rows that depend on batch statistics."""
    rows = model(batch[0])
    return (rows - rows.mean(0)) / rows.std(0)


def test_rows_of_a_loss_over_the_whole_batch_must_not_depend_on_other_samples() -> None:
    assert check(make_workload(loss=INFO_NCE)) == []
    dropping = make_workload(model=lambda: nn.Sequential(network(), nn.Dropout(0.5)).double(), loss=INFO_NCE)
    assert check(dropping) == []
    seeing = WholeBatchLoss(represent=standardised, loss=INFO_NCE.loss)
    with pytest.raises(InputError, match="each row from its own sample alone") as caught:
        check(make_workload(loss=seeing))
    assert "\n" not in str(caught.value)
    (note,) = check(make_workload(loss=seeing), micro_batch=24)
    assert "exact as long as memory does not run out" in note


def test_a_loss_that_cannot_be_split_is_an_error_of_one_line_with_both_figures_and_the_cause() -> None:
    figures = r"norm [\d.e+-]+ at once and [\d.e+-]+ in micro-batches, which differs by .*"
    for loss, cause in (
        (batch_penalty, "depends on several samples at once"),
        (lambda m, b: Loss(mean_loss(m, b), len(b[0])), "mean over something else"),
        (lambda m, b: Loss(mean_loss(m, b) * len(b[0]), 1), "with the sum and the number of its items"),
    ):
        with pytest.raises(InputError, match=figures + cause) as caught:
            check(make_workload(loss=loss))
        assert "\n" not in str(caught.value)


DRAWING = {"a sum with noise"}
"""Losses that draw in each forward pass, also in eval mode."""
HIDDEN = "its draws alone change the gradient"
PASSES = {
    "float64": {},
    "bf16": {"budget": "4KiB", "precision": "bf16"},
    "fp16": {"budget": "4KiB", "precision": "fp16"},
}
"""Room for a copy in float64, or none, and the precision of the run."""


@pytest.mark.parametrize(
    ("passes", "kind"),
    [
        *(("float64", kind) for kind in PAIRS),
        *(("bf16", kind) for kind in ("masked tokens", "class weights", "augmented views")),
        *(("fp16", kind) for kind in ("masked tokens", "a sum with noise")),
    ],
)
def test_wrong_losses_are_refused_or_noted_and_right_ones_train(passes, kind) -> None:
    fields, wrong, right, cause = PAIRS[kind]
    if passes != "float64":
        data = fields.get("train_data", points())
        if type(data) is Rows:
            data = Rows(*(one.float() if one.is_floating_point() else one for one in data.columns))
        model = fields.get("model", network)
        fields = {**fields, "train_data": data, "model": lambda: model().float()}
    options = PASSES[passes]
    assert noted_or_refused(make_workload(**fields, loss=wrong), cause, options, is_random=kind in DRAWING)
    notes = check(make_workload(**fields, loss=right), **options)
    assert notes == [] or (kind in DRAWING and HIDDEN in notes[0])


def noted_or_refused(workload, cause: str, options: dict[str, str], *, is_random: bool) -> bool:
    try:
        (note,) = check(workload, **options)
    except InputError as error:
        return cause in str(error)
    return is_random and HIDDEN in note


DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "one number for all": lambda x: x * torch.rand(()) + np.random.rand(),
    "samples last": lambda x: x + torch.rand(5, len(x)).T,
    "own generator": lambda x: x + torch.rand(x.shape, generator=OWN, dtype=x.dtype),
    "checkpointed": lambda x: checkpoint(lambda x: x + torch.rand_like(x), x, use_reentrant=False),
}
OWN = torch.Generator()


class Noise(nn.Module):
    """A network with random draws, in eval mode too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body = kind, network()

    def forward(self, x):
        return self.body(DRAWS[self.kind](x))


@pytest.mark.parametrize("kind", DRAWS)
def test_means_over_samples_are_never_refused_beside_random_draws(kind: str) -> None:
    notes = check(make_workload(model=lambda: Noise(kind)))
    assert notes == [] or HIDDEN in notes[0] or "generator of its own" in notes[0]


class Counting:
    """A loss that depends on how often it ran."""

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, model, batch):
        self.passes += 1
        return mean_loss(model, batch) * self.passes


def mixed_up(model, batch):
    order = torch.randperm(len(batch[0]))
    return mean_loss(model, (batch[0] + batch[0][order], batch[1]))


def out_of_memory(model, batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def never_more_than_one(samples):
    if len(samples) > 1:
        raise ValueError("one at a time")
    return default_collate(samples)


def noisy_and_counted(samples):
    inputs, labels = default_collate(samples)
    return inputs + torch.randn_like(inputs), labels, torch.tensor(len(samples))


def broken(model, batch):
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss": Counting()}, "keeps state between passes"),
        ({"loss": mixed_up}, HIDDEN),
        ({"collate": noisy_and_counted}, "cannot be cut into 8 samples"),
        ({"collate": never_more_than_one}, "collate raised ValueError: one at a time"),
        ({"loss": lambda model, batch: mean_loss(model, batch) * 0.0}, "the gradient of 8 samples is zero"),
        ({"loss": broken}, "loss raised ValueError: no such thing"),
        ({"loss": out_of_memory}, "memory ran out for 8 samples"),
        ({"train_data": points(1)}, "the batch has 1"),
    ],
)
def test_a_check_that_cannot_be_made_is_a_note(changes, reason: str) -> None:
    (note,) = check(make_workload(**changes))
    assert note.startswith("not checked whether the loss can be split into micro-batches exactly: ")
    assert re.search(reason, note)
    assert "\n" not in note
    assert check(make_workload(**changes), micro_batch=24) == [], "no batch is split"


def test_padding_that_the_model_sees_is_named() -> None:
    data = [torch.randn(length, 5, dtype=torch.float64) for length in (2, 3, 5, 7, 4, 6, 9, 8)]

    def loss(model, batch):
        return model(batch.transpose(0, 1).mean(0)).square().mean()

    padded = torch.nn.utils.rnn.pad_sequence
    workload = make_workload(train_data=data, collate=lambda s: padded(s, batch_first=True), loss=loss)
    with pytest.raises(InputError, match="padding"):
        check(workload)


def balanced(model, batch):
    """Add the load-balancing term of a mixture of experts while training."""
    scores = model(batch[0])
    return cross_entropy(scores, batch[1]) + model.training * scores.softmax(1).mean(0).square().sum()


def entropic(model, batch):
    """Add a term to each sample while training."""
    scores = model(batch[0])
    return cross_entropy(scores, batch[1]) + model.training * scores.softmax(1).square().sum(1).mean()


def hardest(model, batch):
    """Train on the 20 hardest samples, which are all samples of a small batch."""
    errors = cross_entropy(model(batch[0]), batch[1], reduction="none")
    return errors.topk(min(20, len(errors))).values.mean()


def test_terms_of_training_and_of_many_samples_are_seen() -> None:
    for loss in (balanced, hardest):
        with pytest.raises(InputError, match="several samples at once"):
            check(make_workload(train_data=points(300), loss=loss), micro_batch=16, target_batch=96)
    assert check(make_workload(train_data=points(300), loss=entropic), micro_batch=16, target_batch=96) == []


def test_a_whole_that_does_not_fit_is_cut_to_a_micro_batch() -> None:
    sizes = set[int]()

    def loss(model, batch):
        sizes.add(len(batch[0]))
        if len(batch[0]) > 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return hardest(model, batch)

    with pytest.raises(InputError, match="the gradient of 32 samples"):
        check(make_workload(train_data=points(300), loss=loss), micro_batch=32, target_batch=96)
    assert sizes >= {64, 32}


def test_only_samples_of_one_batch_are_compared_if_a_sampler_chooses_them() -> None:
    def loss(model, batch):
        assert len(set(batch[1].tolist())) == 1, "samples of two kinds never meet"
        return mean_loss(model, batch)

    data = points(48)
    data.columns = (data.columns[0], torch.arange(48) // 24)
    workload = make_workload(train_data=data, loss=loss, sampler=list(range(48)))
    sampler = GlobalBatchSampler(
        samples=48, target_batch=24, seed=0, steps=2, order=lambda _: list(range(48))
    )
    assert check_loss_splits(make_setup(workload), micro_batch=8, sampler=sampler) == []


@pytest.mark.parametrize("name", sorted({*WORKLOADS} - {"contrastive", "gpt-checkpointed", "mlp-heavy"}))
def test_models_of_many_kinds_give_no_alarm(name: str) -> None:
    found = examined(make_setup(WORKLOADS[name]()), 16)
    assert (found.fault, found.unchecked) == (None, None)


@pytest.mark.parametrize("name", ["augmented, averaged", "thawed, averaged"])
def test_the_check_changes_no_bit_of_the_run(name: str) -> None:
    def weights_after(*, checked: bool) -> torch.Tensor:
        workload, options = RUNS[name]()
        loop = make_loop(workload, **{"target_batch": 7, "micro_batch": 3, "steps": 4, **options})
        if checked:
            setup = replace(make_setup(workload), model=loop.train_state.model, device=loop.device)
            examine(setup, 3, first_samples(loop.sampler))
        list(loop.run())
        return weights(loop.train_state.model)

    assert torch.equal(weights_after(checked=True), weights_after(checked=False))


def test_a_model_may_run_in_train_mode_only() -> None:
    class TrainingOnly(nn.Sequential):
        def forward(self, inputs):
            assert self.training
            return super().forward(inputs)

    assert check(make_workload(model=lambda: TrainingOnly(network()))) == []
    with pytest.raises(InputError, match="depends on several samples at once"):
        check(
            make_workload(
                model=lambda: TrainingOnly(network(torch.float32)),
                loss=contrastive_loss,
                train_data=points(dtype=torch.float32),
            )
        )


def test_a_part_without_a_target_does_not_hide_the_cause() -> None:
    def mean_over_targets(model, batch):
        inputs, labels, is_target = batch
        losses = cross_entropy(model(inputs), labels, reduction="none")
        return (losses * is_target).sum() / is_target.sum().clamp(min=1)

    data = points(40)
    data.columns = (*data.columns, (torch.arange(40) % 5 == 4).double())
    with pytest.raises(InputError, match="a mean over something else than samples"):
        check(make_workload(train_data=data, loss=mean_over_targets))


class Center(nn.Module):
    """A loss like that of DINO: scores beside a centre that each pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3, dtype=torch.float64))

    def forward(self, scores: Tensor, teacher: Tensor) -> Tensor:
        targets = ((teacher - self.center) / 0.04).softmax(1).detach()
        self.center = self.center * 0.9 + teacher.detach().mean(0, keepdim=True) * 0.1
        return -(targets * scores.log_softmax(1)).sum(1).mean()


class Dino(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.center = network(), network(), Center()
        self.teacher.requires_grad_(False)


def dino(model: nn.Module, batch) -> Tensor:
    return model.center(model.student(batch[0]), model.teacher(batch[0]))


def test_state_through_which_micro_batches_see_each_other_is_named() -> None:
    with pytest.raises(InputError, match=r"the forward pass writes center\.center.*after_step"):
        check(make_workload(model=Dino, loss=dino))


def normalised() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(5), network()).double()


@pytest.mark.parametrize(
    ("options", "micro_batch"),
    [
        ({"steps": None, "epochs": 1, "target_batch": 23}, 8),
        ({"target_batch": 9}, 2),
        ({}, 1),
    ],
)
def test_a_batch_norm_of_one_sample_is_refused_before_training(options, micro_batch: int) -> None:
    with pytest.raises(InputError, match="this run has a micro-batch of 1"):
        check(make_workload(model=normalised), micro_batch=micro_batch, **options)
