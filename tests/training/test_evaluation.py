"""Validation figures do not depend on the micro-batch, and running out of memory does not end them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autobatch
from autobatch.cli.failures import describe_failure
from autobatch.core.errors import DoesNotFitError, InputError, RestartSmallerError
from autobatch.device.cpu import SilentMeter
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.training.evaluation import ValidationBatchSize, evaluate, sanity_check_validation
from autobatch.workload.contract import Loss, WholeBatchLoss
from tests.support.training import (
    IGNORED,
    INFO_NCE,
    language_model,
    make_loop,
    make_workload,
    network,
    points,
    token_loss,
    tokens,
)


def accuracy(model: nn.Module, batch) -> dict:
    inputs, labels = batch
    return {"accuracy": (model(inputs).argmax(1) == labels).double().mean()}


def token_accuracy(model: nn.Module, batch) -> dict:
    ids, labels = batch
    counted = labels != IGNORED
    return {"accuracy": Loss(((model(ids).argmax(-1) == labels) & counted).sum(), counted.sum())}


KINDS = {
    "mean": make_workload(validation_data=points(23, seed=1), metrics=accuracy),
    "tokens": make_workload(
        model=language_model,
        train_data=tokens(),
        loss=token_loss,
        validation_data=tokens(23, seed=1),
        metrics=token_accuracy,
    ),
}


def figures(workload, batch_size: int | ValidationBatchSize, **options) -> dict[str, float]:
    loop = make_loop(workload)
    if isinstance(batch_size, int):
        batch_size = ValidationBatchSize(batch_size)
    settings = {"device": loop.device, "meter": SilentMeter(), "target_batch": 24, **options}
    return evaluate(workload, loop.train_state, batch_size=batch_size, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch", [1, 2, 7, 22])
def test_figures_are_those_of_all_samples_at_once(kind: str, micro_batch: int) -> None:
    whole = figures(KINDS[kind], 23)
    assert set(whole) == {"loss", "accuracy"}
    assert figures(KINDS[kind], micro_batch) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("micro_batch", [1, 3, 10, 23])
def test_a_loss_over_a_whole_batch_is_that_of_batches_as_large_as_in_training(micro_batch: int) -> None:
    """The figure of fewer samples, as the micro-batch has them, would be another one."""
    held_out = points(23, seed=1)
    workload = make_workload(loss=INFO_NCE, validation_data=held_out, metrics=accuracy)
    loop = make_loop(workload)
    parts = [
        torch.utils.data.default_collate([held_out[i] for i in ids]) for ids in (range(10), range(10, 20))
    ]
    parts.append(torch.utils.data.default_collate([held_out[i] for i in range(20, 23)]))
    with torch.no_grad():
        losses = [float(INFO_NCE(loop.train_state.model, part)) * len(part[0]) for part in parts]
    found = figures(workload, micro_batch, target_batch=10)
    assert found["loss"] == pytest.approx(sum(losses) / 23, rel=1e-12)
    assert found["accuracy"] == pytest.approx(figures(workload, 23)["accuracy"], rel=1e-12)
    if micro_batch == 10:
        assert found["loss"] != pytest.approx(
            figures(workload, micro_batch, target_batch=23)["loss"], rel=1e-2
        )


def test_out_of_memory_within_a_whole_batch_keeps_its_rows() -> None:
    seen: list[int] = []

    def represent(model, batch):
        seen.append(len(batch[0]))
        if len(batch[0]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(batch[0])

    data = points(23, seed=1)
    workload = make_workload(
        validation_data=data, loss=WholeBatchLoss(represent=represent, loss=INFO_NCE.loss)
    )
    expected = figures(make_workload(validation_data=data, loss=INFO_NCE), 23, target_batch=12)
    assert figures(workload, 8, target_batch=12) == pytest.approx(expected, rel=1e-12)
    assert seen == [8, 4, 4, 4, 4, 4, 3]


def limited(limit: int, seen: list[int]):
    def loss(model, batch):
        seen.append(len(batch[0]))
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


def test_out_of_memory_halves_the_micro_batch_and_counts_no_sample_twice() -> None:
    seen: list[int] = []
    workload = make_workload(validation_data=points(23, seed=1), loss=limited(5, seen), metrics=accuracy)
    assert figures(workload, 16) == pytest.approx(figures(KINDS["mean"], 23), rel=1e-12)
    assert seen == [16, 8, 4, 4, 4, 4, 4, 3]


def test_out_of_memory_at_one_sample_is_said() -> None:
    workload = make_workload(validation_data=points(3), loss=limited(0, []))
    with pytest.raises(DoesNotFitError, match="in validation at a micro-batch of 1"):
        figures(workload, 2)


def test_modes_come_back_one_by_one_and_weights_are_untouched() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5), network(), nn.Dropout(0.5)).double()

    workload = make_workload(model=build, validation_data=points(9))
    loop = make_loop(workload)
    model = loop.train_state.model.train()
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(
        workload,
        loop.train_state,
        device=loop.device,
        meter=SilentMeter(),
        batch_size=ValidationBatchSize(4),
        target_batch=24,
    )
    assert [module.training for module in (model, *model)] == [True, False, True, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def by_hand(kind: str) -> dict[str, float]:
    """Every sample by itself, in Python's floats."""
    workload = KINDS[kind]
    model = make_loop(workload).train_state.model.eval()
    losses, hits = [], []
    for inputs, labels in (workload.validation_data[index] for index in range(23)):
        out = model(inputs[None])[0].detach().reshape(-1, model(inputs[None]).shape[-1])
        for row, label in zip(out.tolist(), labels.reshape(-1).tolist(), strict=True):
            if label != IGNORED:
                losses.append(math.log(sum(map(math.exp, row))) - row[label])
                hits.append(row.index(max(row)) == label)
    return {"loss": sum(losses) / len(losses), "accuracy": sum(hits) / len(hits)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("start", "grows"), [(1, True), (3, True), (5, False), (23, True)])
def test_figures_are_those_of_every_sample_by_itself(kind: str, start: int, grows: bool) -> None:
    assert figures(KINDS[kind], ValidationBatchSize(start, grows=grows)) == pytest.approx(
        by_hand(kind), rel=1e-12
    )


def test_the_micro_batch_doubles_while_it_fits_and_what_failed_is_not_tried_again() -> None:
    seen: list[int] = []
    workload = make_workload(validation_data=points(60, seed=1), loss=limited(9, seen))
    batch_size = ValidationBatchSize(2, grows=True)
    assert figures(workload, batch_size)["loss"] > 0
    assert seen == [2, 4, 8, 16, 8, 8, 8, 8, 8, 6]
    assert sum(seen) - 16 == 60
    seen.clear()
    figures(workload, batch_size)
    assert seen == [8] * 7 + [4], "what was learnt holds for the next validation"


def test_another_error_at_a_size_that_nobody_asked_for_is_no_error_of_the_workload() -> None:
    """Kernels that index with 32 bits refuse what is too large for them in words of their own."""

    def loss(model, batch):
        if len(batch[0]) > 6:
            raise RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false.")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    workload = make_workload(validation_data=points(23, seed=1), loss=loss)
    assert figures(workload, ValidationBatchSize(5, grows=True)) == pytest.approx(
        {"loss": by_hand("mean")["loss"]}, rel=1e-12
    )
    with pytest.raises(RuntimeError, match="canUse32BitIndexMath"):
        figures(workload, ValidationBatchSize(7))


def test_on_a_simulated_gpu_validation_takes_more_than_training_could(tmp_path: Path) -> None:
    """Real refusals of the allocator's model: without a backward pass 48 MiB hold many more samples."""

    def build() -> nn.Module:
        blocks = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
        return nn.Sequential(nn.Linear(5, 256), *blocks, nn.Linear(256, 3)).double()

    workload = make_workload(model=build, validation_data=points(6_000, seed=1))
    device = SimulatedDevice(load_profile("rtx-4090", user_dir=tmp_path), memory_budget="48MiB")
    loop = make_loop(workload, micro_batch=512, target_batch=512, steps=1, device=device)
    expected = evaluate(
        workload,
        loop.train_state,
        device=loop.device,
        meter=SilentMeter(),
        batch_size=ValidationBatchSize(512),
        target_batch=24,
    )
    with device.training() as meter:
        meter.count(tensor.data for tensor in loop.train_state.model.parameters())
        batch_size = ValidationBatchSize(512, grows=True)
        found = evaluate(
            workload, loop.train_state, device=device, meter=meter, batch_size=batch_size, target_batch=24
        )
        assert meter.stats().peak_reserved_bytes <= device.budget_bytes
        assert batch_size.micro_batch >= 2048
        loop.meter, loop.micro_batch = meter, batch_size.micro_batch
        loop.sampler = replace(loop.sampler, target_batch=batch_size.micro_batch)
        with suppress(RestartSmallerError):
            next(loop.run())
        assert loop.micro_batch < batch_size.micro_batch, "training does not take as many"
    assert found == pytest.approx(expected, rel=1e-12)


def test_before_training_two_samples_are_tried_and_nothing_is_drawn() -> None:
    seen: list[int] = []

    def metrics(model, batch):
        assert not model.training
        seen.append(len(batch[0]))
        return {"noise": torch.rand(())}

    workload = make_workload(validation_data=points(9), metrics=metrics)
    loop = make_loop(workload)
    state = torch.get_rng_state()
    sanity_check_validation(workload, loop.train_state, device=loop.device, meter=SilentMeter())
    assert seen == [2]
    assert torch.equal(torch.get_rng_state(), state)
    assert loop.train_state.model.training
    sanity_check_validation(make_workload(), loop.train_state, device=loop.device, meter=SilentMeter())


def wrong_key(model, batch):
    return {"accuracy": batch["label"]}


def no_figure(model, batch):
    return {"accuracy": model(batch[0])}


@pytest.mark.parametrize(
    ("metrics", "error", "said"),
    [
        (wrong_key, TypeError, "raised by the workload: metrics"),
        (no_figure, InputError, "the validation metric 'accuracy' must be a 0-d tensor"),
        (lambda model, batch: 3.0, InputError, "must return a mapping of names to values, found a float"),
        (lambda model, batch: {1: 3.0}, InputError, "must name each value with text, found the name 1"),
        (
            lambda model, batch: {"loss": 3.0},
            InputError,
            "returned a metric named 'loss', which is the name of the validation loss",
        ),
    ],
)
def test_a_mistake_in_the_metrics_costs_no_training(metrics, error, said: str, tmp_path: Path) -> None:
    workload = make_workload(validation_data=points(9), metrics=metrics)
    options = {"device": "cpu", "memory_budget": "1GiB", "target_batch": 24, "steps": 5, "trials": 0}
    with pytest.raises(error) as caught:
        autobatch.fit(workload, **options, out=str(tmp_path / "run"))
    assert said in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert describe_failure(caught.value).exit_code == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_without_validation_data_there_are_no_figures() -> None:
    assert figures(make_workload(), 4) == {}


def test_a_figure_that_is_not_finite_is_reported_as_such(tmp_path: Path) -> None:
    workload = make_workload(
        validation_data=points(9), metrics=lambda model, batch: {"ratio": torch.tensor(float("nan"))}
    )
    options = {"device": "cpu", "memory_budget": "1GiB", "target_batch": 24, "steps": 3, "trials": 0}
    done = autobatch.fit(workload, **options, validate_every=1, out=str(tmp_path))
    assert done.training.validation["ratio"] is None
    assert math.isfinite(done.training.validation["loss"])
    assert done.report is not None, "what was written can be read again"
    assert "not finite" in (tmp_path / "report.html").read_text()
