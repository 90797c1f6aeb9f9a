"""The check tells losses that can be split from those that cannot, and lists the likely causes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from autobatch import InputError, Loss, WholeBatchLoss
from benchmarks.workloads import WORKLOADS
from tests.support.kinds import Everything
from tests.support.split_losses import PAIRS, checked
from tests.support.training import INFO_NCE, Rows, make_workload, mean_loss, network, points

HIDDEN = "its draws alone change the gradient"


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({"model": lambda: nn.Sequential(network(), nn.Dropout(0.5)).double(), "loss": INFO_NCE}, "1GiB"),
        ({"model": lambda: network(torch.float32), "train_data": points(dtype=torch.float32)}, "11KiB"),
        ({"model": lambda: network(torch.bfloat16), "train_data": points(dtype=torch.bfloat16)}, "1GiB"),
    ],
)
def test_losses_that_can_be_split_give_no_note(changes, budget: str) -> None:
    assert checked(make_workload(**changes), budget=budget) == []


def test_a_loss_that_cannot_be_split_is_an_error_of_one_line_with_both_figures_and_the_causes() -> None:
    figures = r"norm [\d.e+-]+ at once and [\d.e+-]+ in micro-batches, which differs by .*"
    seeing = WholeBatchLoss(represent=lambda m, b: m(b[0]) / m(b[0]).std(0), loss=INFO_NCE.loss)
    for loss, cause in (
        (
            lambda m, b: Loss(mean_loss(m, b) * len(b[0]), 1),
            "the loss is a sum over the batch, so",
        ),
        (lambda m, b: mean_loss(m, b) * len(b[0]) ** 2, r"likely causes .*return Loss\(total, count\)"),
        (seeing, "each row from its own sample alone"),
    ):
        with pytest.raises(InputError, match=figures + cause) as caught:
            checked(make_workload(loss=loss))
        assert "\n" not in str(caught.value)
        (note,) = checked(make_workload(loss=loss), micro_batch=24)
        assert "exact as long as memory does not run out" in note


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in PAIRS),
        ("class weights", {"budget": "11KiB", "precision": "bf16"}),  # no room for a copy in float64
    ],
)
def test_wrong_losses_are_refused_or_noted_and_right_ones_train(kind: str, options) -> None:
    fields, wrong, right = PAIRS[kind]
    if options:
        data = Rows(fields["train_data"].columns[0].float(), fields["train_data"].columns[1])
        fields = {**fields, "train_data": data, "model": lambda: network(torch.float32)}
    try:
        (said,) = checked(make_workload(**fields, loss=wrong), **options)
    except InputError as error:
        said = str(error)
    assert "likely causes" in said or HIDDEN in said
    notes = checked(make_workload(**fields, loss=right), **options)
    assert notes == [] or HIDDEN in notes[0]


def out_of_memory(model, batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


OWN = torch.Generator()


def drawing(model, batch):
    return mean_loss(model, (batch[0] + torch.rand(batch[0].shape, generator=OWN), batch[1]))


def never_more_than_one(samples):
    if len(samples) > 1:
        raise ValueError("one at a time")
    return default_collate(samples)


def noisy_and_counted(samples):
    inputs, labels = default_collate(samples)
    return inputs + torch.randn_like(inputs), labels, torch.tensor(len(samples))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"collate": noisy_and_counted}, "cannot be cut into 8 samples"),
        ({"collate": never_more_than_one}, "collate raised ValueError: one at a time"),
        ({"loss": lambda model, batch: mean_loss(model, batch) * 0.0}, "the gradient of 8 samples is zero"),
        ({"loss": out_of_memory}, "memory ran out for 8 samples"),
        ({"train_data": points(1)}, "the batch has 1"),
        ({"loss": drawing}, "generator of its own"),
    ],
)
def test_a_check_that_cannot_be_made_is_a_note(changes, reason: str) -> None:
    (note,) = checked(make_workload(**changes))
    assert note.startswith("not checked whether the loss can be split into micro-batches exactly: ")
    assert re.search(reason, note)
    assert "\n" not in note
    assert checked(make_workload(**changes), micro_batch=24) == [], "no batch is split"


def hardest(model, batch):
    """Train on the 20 hardest samples, which are all samples of a small batch."""
    if len(batch[0]) > 50:
        out_of_memory(model, batch)
    errors = cross_entropy(model(batch[0]), batch[1], reduction="none")
    return errors.topk(min(20, len(errors))).values.mean()


def test_terms_of_many_samples_are_seen() -> None:
    with pytest.raises(InputError, match=r"the gradient of 32 samples.*several samples at once"):
        checked(make_workload(train_data=points(300), loss=hardest), micro_batch=32, target_batch=96)


@pytest.mark.parametrize("name", ["resnet-bn", "gpt-ragged", "encoder-dropout", "lstm", "experts"])
def test_models_of_many_kinds_give_no_alarm(name: str) -> None:
    assert checked(WORKLOADS[name](), micro_batch=16, target_batch=48) == []


def test_a_model_may_run_in_train_mode_only() -> None:
    class TrainingOnly(nn.Sequential):
        def forward(self, inputs):
            assert self.training
            return super().forward(inputs)

    assert checked(make_workload(model=lambda: TrainingOnly(network()))) == []


def test_state_through_which_micro_batches_see_each_other_is_refused() -> None:
    with pytest.raises(InputError, match=r"state that each forward pass writes.*after the optimizer's step"):
        checked(make_workload(model=lambda: Everything().double()))
