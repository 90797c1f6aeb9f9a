"""The share of a micro-batch in the loss of its batch, and what is no loss."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autobatch.core.errors import InputError
from autobatch.step.loss_share import check_has_value
from autobatch.step.train_step import train_step
from autobatch.workload.contract import Loss
from tests.support.steps import SAMPLES, split, train_state_of
from tests.support.training import make_workload, mean_loss


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(batch[0]), "0-d tensor or a Loss, found a tensor of shape"),
        (lambda model, batch: 1.0, "found a float"),
        (lambda model, batch: Loss(model(batch[0]).sum(1), 3), "total of a Loss"),
        (lambda model, batch: Loss(model(batch[0]).sum(), batch[1] > 0), "count of a Loss must be a number"),
        (lambda model, batch: mean_loss(model, batch).detach(), "no gradient"),
        (lambda model, batch: Loss(model(batch[0]).sum().detach(), 3), "no gradient"),
    ],
)
def test_an_invalid_loss_is_refused(loss, said: str) -> None:
    workload = make_workload(loss=loss)
    with pytest.raises(InputError, match=said):
        train_step(train_state_of(workload), split(workload, [12, 12]), SAMPLES)


def test_an_invalid_number_as_count_is_found_in_its_micro_batch() -> None:
    """The sum of the counts is valid, and one of them is not."""
    counts = iter([-5, 30])
    workload = make_workload(loss=lambda model, batch: Loss(mean_loss(model, batch), next(counts)))
    with pytest.raises(InputError, match="found -5 for a micro-batch"):
        train_step(train_state_of(workload), split(workload, [12, 12]), SAMPLES)


def test_a_loss_and_a_mean_cannot_be_mixed() -> None:
    kinds = iter([lambda t: t, lambda t: Loss(t, 12)])
    workload = make_workload(loss=lambda model, batch: next(kinds)(mean_loss(model, batch)))
    with pytest.raises(InputError, match="a tensor for another"):
        train_step(train_state_of(workload), split(workload, [12, 12]), SAMPLES)


def test_a_loss_without_a_value_is_refused_outside_of_a_trace() -> None:
    with FakeTensorMode():
        fake = torch.zeros(())
        check_has_value(fake)
    with pytest.raises(InputError, match="FakeTensor"):
        check_has_value(fake)
    check_has_value(torch.zeros(()))
