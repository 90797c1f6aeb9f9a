"""The parts of a train state, and the optimizers that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.step.ema import WeightAverage
from autobatch.step.train_state import precision_context
from tests.support.steps import train_state_of
from tests.support.training import INFO_NCE, make_workload, network

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda params, lr: None, "found nothing"),
        (lambda params, lr: [torch.optim.SGD(params, lr=lr), 3], "found an int"),
        (lambda params, lr: torch.optim.SGD([torch.zeros(1)], lr=lr), "found 0 of 1"),
    ],
)
def test_an_invalid_optimizer_is_refused(optimizer, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        train_state_of(make_workload(optimizer=optimizer))
    assert "\n" not in str(caught.value)


def test_fp16_parameters_are_refused_under_a_loss_scale_only() -> None:
    workload = make_workload(model=lambda: network(torch.float16))
    with pytest.raises(InputError, match="--precision fp16 needs fp32 parameters, found fp16"):
        train_state_of(workload, precision="fp16")
    assert train_state_of(workload).scaler is None


@pytest.mark.parametrize(("precision", "is_scaled"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_only_fp16_has_a_loss_scale(precision: str, is_scaled: bool) -> None:
    workload = make_workload(model=lambda: network(torch.float32))
    assert (train_state_of(workload, precision=precision).scaler is not None) is is_scaled


def test_parameters_of_several_optimizers_count_once() -> None:
    def two(params, lr):
        first, second, *rest = params
        return [torch.optim.SGD([first, second], lr=lr), torch.optim.AdamW([second, *rest], lr=lr)]

    train_state = train_state_of(make_workload(optimizer=two), ema=0.9)
    assert [type(one) for one in train_state.optimizers] == [torch.optim.SGD, torch.optim.AdamW]
    assert list(map(id, train_state.parameters)) == list(map(id, train_state.model.parameters()))
    assert isinstance(train_state.average, WeightAverage)
    assert train_state.average.decay == 0.9


def test_the_learning_rate_and_the_clip_are_those_given() -> None:
    train_state = train_state_of(make_workload(), learning_rate=0.25, max_grad_norm=2.0)
    assert train_state.optimizers[0].param_groups[0]["lr"] == 0.25
    assert train_state.max_grad_norm == 2.0


def test_large_buffers_are_copied_for_a_loss_over_the_whole_batch_only() -> None:
    class Queue(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.register_buffer("queue", torch.zeros(2**18 + 1))

    for changes, is_restored in (({}, False), ({"loss": INFO_NCE}, True)):
        train_state = train_state_of(make_workload(model=Queue, **changes))
        train_state.buffers.take()
        train_state.model.queue.add_(1)
        assert train_state.buffers.restore() is is_restored
        assert bool((train_state.model.queue == 0).all()) is is_restored


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_product_has_the_type_of_the_precision(precision, dtype: torch.dtype) -> None:
    with precision_context(CPU, precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert not torch.is_autocast_enabled("cpu")
