"""One optimizer step in micro-batches against one pass over the whole window, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch.errors import InputError
from autobatch.planning import micro_batches
from autobatch.step import Trainee, accumulate, assemble, finish, run_window
from autobatch.workload import Loss, Workload
from tests.training.helpers import (
    IGNORED,
    Rows,
    apart,
    language_model,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    token_loss,
    tokens,
    weights,
)

EXACT = 1e-12
SAMPLES = 24


def trainee_of(workload: Workload, **options) -> Trainee:
    torch.manual_seed(0)
    options = {"precision": "fp32", "learning_rate": workload.learning_rate, **options}
    return assemble(workload, workload.model(), torch.device("cpu"), **options)


def off(trainee: Trainee, workload: Workload, expected: torch.Tensor) -> float:
    """How far the step is from the expected one, as a share of it (with SGD: the error of the gradient)."""
    torch.manual_seed(0)
    start = weights(workload.model())
    return apart(weights(trainee.model) - start, expected - start)


def split(workload: Workload, sizes: list[int], first: int = 0):
    for size in sizes:
        ids = range(first, first + size)
        yield torch.utils.data.default_collate([workload.train_data[i] for i in ids]), size
        first += size


def whole_tokens(model: nn.Module, batch) -> torch.Tensor:
    ids, labels = batch
    return cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.7], dtype=torch.float64)


def weighted(model: nn.Module, batch) -> Loss:
    inputs, labels = batch
    total = cross_entropy(model(inputs), labels, weight=CLASS_WEIGHTS, reduction="sum")
    return Loss(total, CLASS_WEIGHTS[labels].sum())


def whole_weighted(model: nn.Module, batch) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)


KINDS = {
    "mean": ({}, mean_loss),
    "tokens": ({"model": language_model, "train_data": tokens(), "loss": token_loss}, whole_tokens),
    "class weights": ({"loss": weighted}, whole_weighted),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", range(1, SAMPLES + 1))
def test_any_split_takes_the_step_of_the_whole_window(kind: str, parts: int) -> None:
    changes, whole = KINDS[kind]
    workload = make_workload(**changes)
    expected, losses = reference(workload, [range(SAMPLES)], whole)
    trainee = trainee_of(workload)
    result = run_window(trainee, split(workload, micro_batches(SAMPLES, math.ceil(SAMPLES / parts))), SAMPLES)
    assert off(trainee, workload, expected) <= EXACT
    assert result.loss == pytest.approx(losses[0], rel=EXACT)
    assert result.applied
    assert all(p.grad is None for p in trainee.model.parameters())


@pytest.mark.parametrize("sizes", [[1, 23], [20, 3, 1], [7, 7, 7, 3], [1] * 23 + [1]])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_sizes_are_weighted_by_what_they_count(kind: str, sizes: list[int]) -> None:
    changes, whole = KINDS[kind]
    workload = make_workload(**changes)
    expected, _ = reference(workload, [range(SAMPLES)], whole)
    trainee = trainee_of(workload)
    run_window(trainee, split(workload, sizes), SAMPLES)
    assert off(trainee, workload, expected) <= EXACT


def test_the_oracle_tells_a_mean_of_means_from_the_whole() -> None:
    """The comparison has teeth: weighting all micro-batches alike fails it by ten orders of magnitude."""
    workload = make_workload(**KINDS["tokens"][0])
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens)
    mutant = make_workload(**{**KINDS["tokens"][0], "loss": whole_tokens})
    trainee = trainee_of(mutant)
    run_window(trainee, split(mutant, [4] * 6), SAMPLES)
    assert off(trainee, workload, expected) > 1e-2


def test_counts_divided_in_float32_would_be_seen() -> None:
    workload = make_workload(**KINDS["tokens"][0])
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens)

    def in_float32(model: nn.Module, batch) -> Loss:
        total, count = token_loss(model, batch)
        share = count / torch.tensor(7)  # integers divided as tensors: float32
        return Loss(total * (share.double() / (count.double() / 7.0).clamp(min=1e-9)), count)

    mutant = make_workload(**{**KINDS["tokens"][0], "loss": in_float32})
    trainee = trainee_of(mutant)
    run_window(trainee, split(mutant, [4] * 6), SAMPLES)
    assert off(trainee, workload, expected) > EXACT


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_micro_batch_that_counts_nothing_adds_nothing(empty: int) -> None:
    data = tokens()
    data.columns[1][empty * 8 : empty * 8 + 8] = IGNORED
    workload = make_workload(model=language_model, train_data=data, loss=token_loss)
    expected, losses = reference(workload, [range(SAMPLES)], whole_tokens)
    trainee = trainee_of(workload)
    result = run_window(trainee, split(workload, [8, 8, 8]), SAMPLES)
    assert off(trainee, workload, expected) <= EXACT
    assert result.loss == pytest.approx(losses[0], rel=EXACT)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_window_that_counts_nothing_takes_no_step_and_the_next_one_does(precision) -> None:
    data = tokens(48)
    data.columns[1][:24] = IGNORED
    workload = make_workload(
        model=lambda: language_model(torch.float32),
        train_data=data,
        loss=token_loss,
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.5),
    )
    trainee = trainee_of(workload, precision=precision)
    before = weights(trainee.model)
    result = run_window(trainee, split(workload, [8, 8, 8]), SAMPLES)
    assert (result.applied, result.count) == (False, 0.0)
    assert math.isnan(result.loss)
    assert torch.equal(weights(trainee.model), before)
    assert not trainee.optimizers[0].state
    after = run_window(trainee, split(workload, [8, 8, 8], first=24), SAMPLES)
    assert after.applied
    assert math.isfinite(after.loss)


def test_a_constant_where_nothing_counts_will_do() -> None:
    def loss(model: nn.Module, batch) -> Loss:
        found = token_loss(model, batch)
        return found if found.count else Loss(torch.zeros(()), 0)

    data = tokens()
    data.columns[1][:8] = IGNORED
    workload = make_workload(model=language_model, train_data=data, loss=loss)
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens)
    trainee = trainee_of(workload)
    run_window(trainee, split(workload, [8, 8, 8]), SAMPLES)
    assert off(trainee, workload, expected) <= EXACT


@pytest.mark.parametrize("count", [int, float, torch.as_tensor, lambda c: torch.as_tensor(c).float()])
def test_a_count_may_be_a_number_or_a_tensor(count) -> None:
    def loss(model: nn.Module, batch) -> Loss:
        found = token_loss(model, batch)
        return Loss(found.total, count(found.count))

    workload = make_workload(**{**KINDS["tokens"][0], "loss": loss})
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens)
    trainee = trainee_of(workload)
    run_window(trainee, split(workload, [5, 19]), SAMPLES)
    assert off(trainee, workload, expected) <= EXACT


@pytest.mark.parametrize("clip", [1e-3, 0.1, 1e3])
def test_clipping_is_that_of_the_whole_window(clip: float) -> None:
    workload = make_workload(**KINDS["tokens"][0])
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens, clip=clip)
    trainee = trainee_of(workload, max_grad_norm=clip)
    run_window(trainee, split(workload, [5, 1, 18]), SAMPLES)
    assert off(trainee, workload, expected) <= EXACT


def test_the_norm_is_that_of_the_whole_window_before_clipping() -> None:
    workload = make_workload()
    torch.manual_seed(0)
    model = workload.model()
    mean_loss(model, next(split(workload, [SAMPLES]))[0]).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    result = run_window(trainee_of(workload, max_grad_norm=1e-3), split(workload, [7, 17]), SAMPLES)
    assert result.grad_norm == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_parameters_add_up(dtype: torch.dtype) -> None:
    """1024 times 1/1024 is 1, and 0.25 where bf16 adds up in bf16."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=dtype))

    workload = make_workload(
        model=One,
        train_data=Rows(torch.ones(1024)),
        loss=lambda model, batch: (model.weight * batch[0].to(dtype)).mean() + 1.0,
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=1.0),
    )
    trainee = trainee_of(workload)
    result = run_window(trainee, split(workload, [1] * 1024), 1024)
    assert trainee.model.weight.item() == -1.0
    assert result.loss == 1.0
    assert trainee.model.weight._backward_hooks is None
    assert not trainee.model.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("samples", [1000, 24])
def test_16_bit_gradients_are_within_one_rounding_of_the_float32_sum(samples: int) -> None:
    """Weights of micro-batches (83 of 1000) are not rounded to 8 bits on their way into the gradient."""
    data = points(samples, dtype=torch.float32)
    workload = make_workload(
        model=lambda: network(torch.bfloat16),
        train_data=data,
        loss=lambda model, batch: cross_entropy(model(batch[0].bfloat16()), batch[1]),
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=1.0),
    )
    sizes = micro_batches(samples, samples // 12)
    trainee = trainee_of(workload)
    parameters = list(trainee.model.parameters())
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for batch, size in split(workload, sizes):
        parts = torch.autograd.grad(workload.loss(trainee.model, batch), parameters)
        for total, part in zip(expected, parts, strict=True):
            total.add_(part.double(), alpha=size / samples)
    tally = accumulate(trainee, split(workload, sizes), samples, lambda _: None)
    seen = []
    trainee.optimizers[0].register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in parameters))
    finish(trainee, tally, mark=lambda _: None)
    for got, wanted in zip(seen, expected, strict=True):
        assert got.dtype == torch.bfloat16
        assert apart(got.double(), wanted) < 2.0**-8


def test_parameters_of_several_precisions_share_a_norm() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 8)
            self.second = nn.Linear(8, 3).bfloat16()

        def forward(self, inputs):
            return self.second(self.first(inputs).bfloat16())

    workload = make_workload(model=Mixed, train_data=points(dtype=torch.float32))
    trainee = trainee_of(workload, max_grad_norm=0.5)
    result = run_window(trainee, split(workload, [12, 12]), SAMPLES)
    assert result.applied
    assert result.grad_norm > 0


def test_sparse_gradients_are_measured_and_stepped_with() -> None:
    def sparse() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 7)).double()

    changes = {**KINDS["tokens"][0], "model": sparse}
    workload = make_workload(**changes)
    dense = make_workload(
        **{**changes, "model": lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()}
    )
    expected, _ = reference(dense, [range(SAMPLES)], whole_tokens, clip=0.1)
    trainee = trainee_of(workload, max_grad_norm=0.1)
    run_window(trainee, split(workload, [5, 19]), SAMPLES)
    assert off(trainee, workload, expected) <= EXACT


def test_gradients_of_what_is_not_trained_are_freed_too() -> None:
    workload = make_workload(optimizer=lambda params, lr: torch.optim.SGD(list(params)[:2], lr=lr))
    trainee = trainee_of(workload)
    run_window(trainee, split(workload, [12, 12]), SAMPLES)
    assert all(p.grad is None for p in trainee.model.parameters())


def test_parameters_that_are_thawed_later_are_trained_and_freed() -> None:
    def frozen() -> nn.Module:
        model = network()
        model[0].requires_grad_(requires_grad=False)
        return model

    workload = make_workload(model=frozen)
    trainee = trainee_of(workload)
    before = trainee.model[0].weight.clone()
    run_window(trainee, split(workload, [12, 12]), SAMPLES)
    assert torch.equal(trainee.model[0].weight, before)
    trainee.model[0].requires_grad_(requires_grad=True)
    run_window(trainee, split(workload, [12, 12]), SAMPLES)
    assert not torch.equal(trainee.model[0].weight, before)
    assert trainee.model[0].weight.grad is None


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(batch[0]), "0-d tensor or a Loss, found a tensor of shape"),
        (lambda model, batch: 1.0, "found a float"),
        (lambda model, batch: Loss(model(batch[0]).sum(1), 3), "total of a Loss"),
        (lambda model, batch: mean_loss(model, batch).detach(), "no gradient"),
        (lambda model, batch: Loss(model(batch[0]).sum().detach(), 3), "no gradient"),
    ],
)
def test_what_is_no_loss_is_named(loss, said: str) -> None:
    workload = make_workload(loss=loss)
    with pytest.raises(InputError, match=said):
        run_window(trainee_of(workload), split(workload, [12, 12]), SAMPLES)


def test_a_loss_and_a_mean_do_not_mix() -> None:
    kinds = iter([lambda t: t, lambda t: Loss(t, 12)])
    workload = make_workload(loss=lambda model, batch: next(kinds)(mean_loss(model, batch)))
    with pytest.raises(InputError, match="a tensor for another"):
        run_window(trainee_of(workload), split(workload, [12, 12]), SAMPLES)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda params, lr: None, "NoneType"),
        (lambda params, lr: [torch.optim.SGD(params, lr=lr), 3], "int"),
        (lambda params, lr: torch.optim.SGD([torch.zeros(1)], lr=lr), "no parameter"),
    ],
)
def test_what_is_no_optimizer_is_named(optimizer, said: str) -> None:
    with pytest.raises(InputError, match=said):
        trainee_of(make_workload(optimizer=optimizer))
