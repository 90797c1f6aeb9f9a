"""One optimizer step in micro-batches, against one pass over the whole batch in float64."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from autobatch import InputError, Loss
from autobatch.rehearsal.rehearsal import attempt
from autobatch.step.train_step import train_step
from tests.support.faults import Fault
from tests.support.kinds import Overflow
from tests.support.step_workloads import setup
from tests.support.steps import EXACT, KINDS, SAMPLES, off, split, step_of
from tests.support.training import (
    IGNORED,
    language_model,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    token_loss,
    tokens,
    train_state_of,
    weights,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sizes", "clip", "scale"),
    [([24], None, None), ([12, 12], 1e-3, None), ([1] * 24, None, None), ([20, 3, 1], 1e-3, 2.0**10)],
)
def test_any_split_takes_the_step_of_the_whole_batch(
    kind: str, sizes: list[int], clip: float | None, scale: float | None
) -> None:
    fields, whole = KINDS[kind]
    workload = make_workload(**fields)
    expected, losses = reference(workload, [range(SAMPLES)], whole, clip=clip)
    train_state = train_state_of(workload, max_grad_norm=clip)
    train_state.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    result = step_of(train_state, workload, sizes)
    assert off(train_state, workload, expected) <= EXACT
    assert result.loss == pytest.approx(losses[0], rel=EXACT)
    assert result.applied
    assert all(p.grad is None for p in train_state.model.parameters())
    torch.manual_seed(0)
    model = workload.model()
    whole(model, split(workload, [SAMPLES])[0][0]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert result.grad_norm == pytest.approx(float(nn.utils.get_total_norm(gradients)), rel=EXACT)


@pytest.mark.parametrize("kind", ["mean", "tokens", "class weights", "terms"])
def test_a_micro_batch_of_no_samples_adds_nothing(kind: str) -> None:
    """A rank with fewer micro-batches than others of a shared model runs such ones."""
    fields, whole = KINDS[kind]
    workload = make_workload(**fields)
    expected, losses = reference(workload, [range(SAMPLES)], whole)
    train_state = train_state_of(workload)
    fed = [*train_state.feed(iter(split(workload, [20, 4])))]
    filler = split(workload, [2])[0][0]
    result = train_step(train_state, [*fed, (filler, 0)], SAMPLES)
    assert off(train_state, workload, expected) <= EXACT
    assert result.loss == pytest.approx(losses[0], rel=EXACT)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_batch_that_counts_nothing_takes_no_step_and_the_next_one_does(precision: str) -> None:
    data = tokens(48)
    data.columns[1][:24] = IGNORED
    workload = make_workload(
        model=lambda: language_model(torch.float32),
        train_data=data,
        loss=token_loss,
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.5),
    )
    train_state = train_state_of(workload, precision=precision)
    before = weights(train_state.model)
    result = step_of(train_state, workload, [8, 8, 8])
    assert (result.applied, result.count) == (False, 0.0)
    assert math.isnan(result.loss)
    assert torch.equal(weights(train_state.model), before)
    assert not train_state.optimizers[0].state
    after = step_of(train_state, workload, [8, 8, 8], first=24)
    assert after.applied
    assert math.isfinite(after.loss)


def test_only_the_optimizer_whose_gradients_overflowed_is_skipped() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calm, self.wild = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.calm(inputs) + Overflow.apply(self.wild(inputs), torch.tensor([True]))

    def two(params: Any, lr: float) -> list[torch.optim.Optimizer]:
        *calm, wild_weight, wild_bias = params
        return [torch.optim.SGD(calm, lr=lr), torch.optim.SGD([wild_weight, wild_bias], lr=lr)]

    workload = make_workload(model=Two, train_data=points(dtype=torch.float32), optimizer=two)
    train_state = train_state_of(workload, precision="fp16", max_grad_norm=0.1)
    before = {name: tensor.clone() for name, tensor in train_state.model.state_dict().items()}
    result = step_of(train_state, workload, [12, 12])
    assert (result.applied, result.stepped) == (True, (True, False))
    # The clip is that of the applied gradients alone, so the step has length 0.1 times the learning rate.
    moved = {name: float((t - before[name]).norm()) for name, t in train_state.model.state_dict().items()}
    assert math.hypot(moved["calm.weight"], moved["calm.bias"]) == pytest.approx(0.1 * 0.1, rel=1e-3)
    assert moved["wild.weight"] == moved["wild.bias"] == 0


def counting(count: Any) -> Any:
    return lambda model, batch: Loss(mean_loss(model, batch), count)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(batch[0]), "0-d tensor or a Loss, found a tensor of shape"),
        (lambda model, batch: (mean_loss(model, batch),), "found a tuple"),
        (lambda model, batch: Loss(model(batch[0]).sum(1), 3), "total of its Loss"),
        (lambda model, batch: mean_loss(model, batch).detach(), "no gradient"),
        (lambda model, batch: Loss(model(batch[0]).sum().detach(), 3), "no gradient"),
        (counting(torch.ones(3)), "count of .* must be a number"),
        *((counting(kind(-1.0)), "count of .* found -[12]") for kind in (float, torch.as_tensor)),
        *((counting(kind(math.nan)), "count of .* found nan") for kind in (float, torch.as_tensor)),
        (counting(torch.tensor(math.inf)), "count of .* found inf"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_invalid_loss_is_refused_and_moves_nothing(loss: Any, said: str, precision: str) -> None:
    workload = make_workload(
        model=lambda: network(torch.float32), train_data=points(dtype=torch.float32), loss=loss
    )
    train_state = train_state_of(workload, precision=precision)
    before = weights(train_state.model)
    with pytest.raises(InputError, match=said):
        step_of(train_state, workload, [12, 12])
    assert torch.equal(weights(train_state.model), before)


def test_a_step_has_one_result_on_both_ways() -> None:
    """Within a dispatch mode its numbers stay tensors."""
    workload = make_workload(model=lambda: network(torch.float32), train_data=points(8, dtype=torch.float32))
    results = []
    for mode in (nullcontext(), Fault()):
        train_state = train_state_of(workload)
        parts = split(workload, [5, 3])
        with mode:
            result = train_step(train_state, parts, 8)
        results.append((result.loss, result.grad_norm, weights(train_state.model)))
    (*read, own), (*computed, other) = results
    assert read == pytest.approx(computed, rel=1e-6)
    assert torch.equal(own, other)


@pytest.mark.parametrize("function", [nn.functional.mse_loss, nn.functional.smooth_l1_loss])
def test_a_mean_that_owns_a_large_buffer_does_not_hold_it(function: Any) -> None:
    """Torch returns some means as the first element of all that they average."""

    def peak(is_alone: bool) -> int | None:
        def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            mean = function(model(batch[0]), torch.zeros(()).expand(len(batch[0]), 3))
            return mean.clone() if is_alone else mean

        return attempt(setup(make_workload(loss=loss)), 20).attempt.peak_allocated_bytes

    assert peak(is_alone=False) == peak(is_alone=True)
