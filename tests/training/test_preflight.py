"""Losses that cannot be split are told from those that can, and the likely cause is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import autobatch
from autobatch.core.errors import InputError
from autobatch.device.cpu import CpuDevice
from autobatch.planning import micro_batches
from autobatch.probing.attempt import TrainSetup
from autobatch.training.batchnorm import equivalent_momentum, smallest_micro_batch
from autobatch.training.preflight import check_loss_splits
from autobatch.workload.contract import Loss, WholeBatchLoss
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.order import GlobalBatchSampler
from tests.support.training import (
    IGNORED,
    INFO_NCE,
    apart,
    language_model,
    make_loop,
    make_workload,
    mean_loss,
    network,
    points,
    token_loss,
    tokens,
)
from tests.support.untouched import model_state


def bench_of(workload, budget: str = "1GiB") -> TrainSetup:
    torch.manual_seed(0)
    return TrainSetup(
        workload=workload,
        model=workload.model(),
        device=CpuDevice(memory_budget=budget),
        worst_case=WorstCaseSampler(workload),
        precision="fp32",
    )


def check(workload, *, micro_batch: int = 8, target_batch: int = 24, budget: str = "1GiB", **options):
    sampler = GlobalBatchSampler(
        samples=len(workload.train_data), target_batch=target_batch, seed=0, **{"steps": 3, **options}
    )
    return check_loss_splits(bench_of(workload, budget), micro_batch=micro_batch, sampler=sampler)


TOKENS = {"model": language_model, "train_data": tokens(), "loss": token_loss}
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.7], dtype=torch.float64)


def contrastive(model, batch):
    features = normalize(model(batch[0]))
    return cross_entropy(features @ features.roll(1, 1).T * 5, torch.arange(len(features)))


def bare_tokens(model, batch):
    ids, labels = batch
    return cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def bare_class_weights(model, batch):
    inputs, labels = batch
    return cross_entropy(model(inputs), labels, weight=CLASS_WEIGHTS.to(inputs.dtype))


def class_weights(model, batch):
    inputs, labels = batch
    weight = CLASS_WEIGHTS.to(inputs.dtype)
    return Loss(cross_entropy(model(inputs), labels, weight=weight, reduction="sum"), weight[labels].sum())


def batch_penalty(model, batch):
    return mean_loss(model, batch) + model(batch[0]).mean(0).norm()


def gradient_penalty(model, batch):
    """A penalty a sample decomposes, though it differentiates on the way."""
    inputs = batch[0].clone().requires_grad_()
    out = model(inputs)
    (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    return cross_entropy(out, batch[1]) + slope.norm(dim=1).pow(2).mean()


def batch_gradient_penalty(model, batch):
    inputs = batch[0].clone().requires_grad_()
    out = model(inputs)
    (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    return cross_entropy(out, batch[1]) + slope.norm()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        TOKENS,
        {"loss": class_weights},
        {"loss": gradient_penalty},
        {"model": lambda: network(torch.float32), "train_data": points(dtype=torch.float32)},
        {"model": lambda: nn.Sequential(network(), nn.Dropout(0.5)).double()},
        {"model": lambda: network(torch.bfloat16), "train_data": points(dtype=torch.bfloat16)},
    ],
    ids=["mean", "tokens", "class weights", "gradient penalty", "fp32", "dropout", "bf16"],
)
@pytest.mark.parametrize("budget", ["1GiB", "4KiB"], ids=["float64", "float32"])
def test_losses_that_can_be_split_pass_without_a_word(changes, budget: str) -> None:
    assert check(make_workload(**changes), budget=budget) == []


def standardised(model, batch):
    """Rows that hold statistics of the batch."""
    rows = model(batch[0])
    return (rows - rows.mean(0)) / rows.std(0)


@pytest.mark.parametrize("budget", ["1GiB", "4KiB"], ids=["float64", "float32"])
def test_of_a_loss_over_the_whole_batch_each_row_must_be_its_samples_own(budget: str) -> None:
    assert check(make_workload(loss=INFO_NCE), budget=budget) == []
    dropping = make_workload(model=lambda: nn.Sequential(network(), nn.Dropout(0.5)).double(), loss=INFO_NCE)
    assert check(dropping, budget=budget) == []
    seeing = WholeBatchLoss(represent=standardised, loss=INFO_NCE.loss)
    with pytest.raises(InputError, match="each row from its own sample alone") as caught:
        check(make_workload(loss=seeing), budget=budget)
    assert "\n" not in str(caught.value)
    (note,) = check(make_workload(loss=seeing), micro_batch=24, budget=budget)
    assert "exact as long as memory does not run out" in note


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"loss": contrastive},
            r"depends on several samples at once .* Use WholeBatchLoss\(represent=…",
        ),
        ({"loss": batch_penalty}, "depends on several samples at once"),
        ({"loss": batch_gradient_penalty}, "depends on several samples at once"),
        ({**TOKENS, "loss": bare_tokens}, r"a mean over something else than samples .* Loss\(total, count\)"),
        ({"loss": bare_class_weights}, "a mean over something else than samples"),
        ({"loss": lambda m, b: cross_entropy(m(b[0]), b[1], reduction="sum")}, "a sum over the batch"),
        ({"loss": lambda m, b: Loss(mean_loss(m, b), len(b[0]))}, "must be the sum over the items"),
        (
            {"loss": lambda m, b: Loss(mean_loss(m, b) * len(b[0]), 1)},
            "count of the workload's Loss is 1 for 6",
        ),
    ],
)
@pytest.mark.parametrize("budget", ["1GiB", "4KiB"], ids=["float64", "float32"])
def test_losses_that_cannot_be_split_are_errors_that_name_the_cause(changes, said, budget) -> None:
    with pytest.raises(InputError, match=said) as caught:
        check(make_workload(**changes), budget=budget)
    assert "\n" not in str(caught.value)


def test_where_no_window_is_split_it_is_a_note() -> None:
    notes = check(make_workload(loss=contrastive), micro_batch=24)
    assert len(notes) == 1
    assert "depends on several samples at once" in notes[0]
    assert "exact as long as memory does not run out" in notes[0]


def test_what_cannot_be_checked_is_not_held_against_the_loss() -> None:
    def noisy(model, batch):
        return mean_loss(model, (batch[0] * torch.rand(()), batch[1]))

    class TrainingOnly(nn.Sequential):
        def forward(self, inputs):
            assert self.training
            return super().forward(inputs)

    assert check(make_workload(loss=noisy)) == []
    assert check(make_workload(model=lambda: TrainingOnly(network()))) == []
    with pytest.raises(InputError, match="depends on several samples at once"):
        check(
            make_workload(
                model=lambda: TrainingOnly(network(torch.float32)),
                loss=contrastive,
                train_data=points(dtype=torch.float32),
            )
        )
    assert check(make_workload(train_data=points(1)), target_batch=4) == []


def test_fit_asks_before_it_trains(tmp_path: Path) -> None:
    """Also where the probe has confirmed that the micro-batch fits."""
    options = {
        "target_batch": 24,
        "max_micro_batch": 8,
        "steps": 1,
        "trials": 0,
        "device": "cpu",
        "memory_budget": "64MiB",
        "out": str(tmp_path / "run"),
    }
    with pytest.raises(InputError, match="depends on several samples at once"):
        autobatch.fit(make_workload(loss=contrastive), **options)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert autobatch.fit(make_workload(), **options).training.optimizer_steps == 1


def test_a_loss_that_cannot_be_split_may_be_trained_all_the_same(tmp_path: Path) -> None:
    options = {"device": "cpu", "memory_budget": "1GiB", "target_batch": 24, "steps": 1, "trials": 0}
    options |= {"max_micro_batch": 8, "out": str(tmp_path / "run")}
    workload = make_workload(loss=contrastive)
    with pytest.raises(InputError, match=r"depends on several samples at once .* use --split-check note"):
        autobatch.fit(workload, **options)
    for choice in ("note", "off"):
        assert autobatch.fit(workload, split_check=choice, **options).training.optimizer_steps == 1
    (note,) = noted(workload, "note")
    assert "depends on several samples at once" in note
    assert "--split-check" not in note
    assert noted(workload, "off") == []


def noted(workload, choice: str) -> list[str]:
    sampler = GlobalBatchSampler(samples=24, target_batch=24, seed=0, steps=3)
    return check_loss_splits(bench_of(workload), micro_batch=8, sampler=sampler, check=choice)


def test_off_still_refuses_a_batch_norm_of_one_sample() -> None:
    workload = make_workload(model=normalised, loss=contrastive)
    sampler = GlobalBatchSampler(samples=24, target_batch=23, seed=0, epochs=1)
    with pytest.raises(InputError, match="this run has a micro-batch of 1"):
        check_loss_splits(bench_of(workload), micro_batch=8, sampler=sampler, check="off")


def test_nothing_is_changed() -> None:
    workload = make_workload(model=lambda: nn.Sequential(nn.BatchNorm1d(5), network()).double())
    setup = bench_of(workload)
    setup.model[1][0].weight.grad = torch.ones(8, 5, dtype=torch.float64)
    before, state = model_state(setup.model), torch.get_rng_state()
    check_loss_splits(
        setup, micro_batch=8, sampler=GlobalBatchSampler(samples=24, target_batch=24, seed=0, steps=3)
    )
    assert model_state(setup.model) == before
    assert torch.equal(torch.get_rng_state(), state)


def normalised(features: int = 5) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(features), network()).double()


def test_batch_norm_is_a_note_with_the_numbers() -> None:
    (note,) = check(make_workload(model=normalised), micro_batch=7)
    assert "1 BatchNorm layers compute their statistics over micro-batches of 6 to 6 samples" in note
    assert "not over the batch of 24" in note
    assert (
        "move 4 times per step: to match the whole batch, set their momentum to 0.026 instead of 0.1" in note
    )
    assert note.endswith("(--bn-momentum auto does this)")
    assert check(make_workload(model=normalised), micro_batch=24) == []


@pytest.mark.parametrize(
    ("options", "micro_batch"),
    [
        ({"steps": None, "epochs": 1, "target_batch": 23}, 8),
        ({"steps": None, "epochs": 2, "target_batch": 23, "last_batch": "flush"}, 8),
        ({"target_batch": 9}, 2),
        ({}, 1),
    ],
)
def test_a_batch_norm_of_one_sample_is_refused_before_training(options, micro_batch: int) -> None:
    with pytest.raises(InputError, match="this run has a micro-batch of 1"):
        check(make_workload(model=normalised), micro_batch=micro_batch, **options)


def test_a_batch_norm_over_pixels_can_have_one_sample() -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.body = nn.BatchNorm1d(1), network()

        def forward(self, inputs):
            return self.body(self.norm(inputs[:, None])[:, 0])

    assert len(check(make_workload(model=lambda: Pixels().double()), micro_batch=1)) == 1


@pytest.mark.parametrize("limit", range(3, 40))
def test_sizes_of_one_come_only_from_limits_of_one_or_two(limit: int) -> None:
    """BatchNorm needs two samples; the even split gives them wherever a limit allows it."""
    for samples in range(2, 200):
        assert min(micro_batches(samples, limit)) >= 2


@pytest.mark.parametrize("last_batch", ["carry", "flush", "drop"])
def test_the_smallest_micro_batch_of_a_run_is_found_without_walking_it(last_batch: str) -> None:
    for samples in range(4, 30):
        for target in range(1, samples + 3):
            for epochs in (1, 2, 3):
                sampler = GlobalBatchSampler(
                    samples=samples, target_batch=target, seed=0, epochs=epochs, last_batch=last_batch
                )
                if sampler.total:
                    expected = min(
                        size for i in range(sampler.total) for size in micro_batches(sampler.size(i), 4)
                    )
                    assert smallest_micro_batch(sampler, 4) == expected


def test_the_momentum_that_is_named_gives_the_running_averages_of_the_whole_batch() -> None:
    def build(momentum: float):
        return lambda: nn.Sequential(nn.BatchNorm1d(5, momentum=momentum), network()).double()

    def averages(momentum: float, micro_batch: int) -> torch.Tensor:
        data = points(512)
        data.columns[0].mul_(2.0).add_(3.0)
        loop = make_loop(
            make_workload(model=build(momentum), train_data=data, learning_rate=1e-6),
            target_batch=256,
            micro_batch=micro_batch,
            steps=4,
        )
        list(loop.run())
        return loop.train_state.model[0].running_mean

    whole = averages(0.1, 256)
    assert apart(averages(equivalent_momentum(0.1, 4), 64), whole) < 0.02
    assert apart(averages(0.1, 64), whole) > 0.5
