"""Validation metrics are independent of the micro-batch, and survive out-of-memory errors."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch import DoesNotFitError, InputError, Loss, RestartSmallerError, WholeBatchLoss
from autobatch.device.cpu import SilentMeter
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.training.validation import Validator, sanity_check_validation
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import sharded_loop
from tests.support.training import (
    IGNORED,
    INFO_NCE,
    language_model,
    make_loop,
    make_workload,
    mean_loss,
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


def validator(workload, micro_batch: int, **options) -> Validator:
    loop = make_loop(workload)
    settings = {"device": loop.device, "meter": SilentMeter(), "target_batch": 24, **options}
    return Validator(workload, loop.train_state, micro_batch=micro_batch, **settings)


def metrics_of(workload, micro_batch: int, **options) -> dict[str, float]:
    return validator(workload, micro_batch, **options).run()


@pytest.mark.parametrize("micro_batch", [1, 3, 10, 23])
def test_a_loss_over_the_whole_batch_is_computed_over_batches_of_the_training_size(micro_batch: int) -> None:
    """The loss over fewer samples, such as a micro-batch, has another value."""
    held_out = points(23, seed=1)
    workload = make_workload(loss=INFO_NCE, validation_data=held_out, metrics=accuracy)
    loop = make_loop(workload)
    parts = [
        torch.utils.data.default_collate([held_out[i] for i in ids]) for ids in (range(10), range(10, 20))
    ]
    parts.append(torch.utils.data.default_collate([held_out[i] for i in range(20, 23)]))
    with torch.no_grad():
        losses = [float(INFO_NCE(loop.train_state.model, part)) * len(part[0]) for part in parts]
    found = metrics_of(workload, micro_batch, target_batch=10)
    assert found["loss"] == pytest.approx(sum(losses) / 23, rel=1e-12)
    assert found["accuracy"] == pytest.approx(metrics_of(workload, 23)["accuracy"], rel=1e-12)
    if micro_batch == 10:
        assert found["loss"] != pytest.approx(
            metrics_of(workload, micro_batch, target_batch=23)["loss"], rel=1e-2
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
    expected = metrics_of(make_workload(validation_data=data, loss=INFO_NCE), 23, target_batch=12)
    assert metrics_of(workload, 8, target_batch=12) == pytest.approx(expected, rel=1e-12)
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
    assert metrics_of(workload, 16) == pytest.approx(metrics_of(KINDS["mean"], 23), rel=1e-12)
    assert seen == [16, 8, 4, 4, 4, 4, 4, 3]


def test_out_of_memory_at_a_micro_batch_of_1_is_an_error() -> None:
    workload = make_workload(validation_data=points(3), loss=limited(0, []))
    with pytest.raises(DoesNotFitError, match="in validation at a micro-batch of 1"):
        metrics_of(workload, 2)


def test_each_mode_is_restored_and_weights_are_unchanged() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5), network(), nn.Dropout(0.5)).double()

    workload = make_workload(model=build, validation_data=points(9))
    loop = make_loop(workload)
    model = loop.train_state.model.train()
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = {"device": loop.device, "meter": SilentMeter(), "target_batch": 24, "micro_batch": 4}
    Validator(workload, loop.train_state, **settings).run()
    assert [module.training for module in (model, *model)] == [True, False, True, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def by_hand(kind: str) -> dict[str, float]:
    """Compute the metrics sample by sample, in Python's floats."""
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
def test_metrics_are_those_of_each_sample_alone(kind: str, start: int, grows: bool) -> None:
    assert metrics_of(KINDS[kind], start, grows=grows) == pytest.approx(by_hand(kind), rel=1e-12)


@pytest.mark.parametrize(
    ("limit", "start", "grows", "first", "second"),
    [
        (9, 5, True, [5, 10, *[5] * 11], [5] * 12),
        (100, 2, True, [2, *[4] * 14, 2], [4] * 15),
        (100, 7, False, [*[7] * 8, 4], [*[7] * 8, 4]),
    ],
)
def test_the_micro_batch_doubles_once_if_it_fits_and_a_failed_size_is_not_tried_again(
    limit: int, start: int, grows: bool, first: list[int], second: list[int]
) -> None:
    """On a large GPU it would climb to tens of GiB, into kernels with 32-bit indices."""
    seen: list[int] = []
    workload = make_workload(validation_data=points(60, seed=1), loss=limited(limit, seen))
    found = validator(workload, start, grows=grows)
    assert found.run()["loss"] > 0
    assert seen == first
    seen.clear()
    found.run()
    assert seen == second


def test_a_lost_context_is_no_size_that_is_too_large() -> None:
    """Nothing runs after it, so a smaller size cannot be tried."""

    def loss(model, batch):
        if len(batch[0]) > 6:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    workload = make_workload(validation_data=points(23, seed=1), loss=loss)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        metrics_of(workload, 5, grows=True)


def test_another_error_at_a_grown_micro_batch_is_not_an_error_of_the_workload() -> None:
    """Kernels with 32-bit indices refuse larger inputs with messages of their own."""

    def loss(model, batch):
        if len(batch[0]) > 6:
            raise RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false.")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    workload = make_workload(validation_data=points(23, seed=1), loss=loss)
    assert metrics_of(workload, 5, grows=True) == pytest.approx({"loss": by_hand("mean")["loss"]}, rel=1e-12)
    with pytest.raises(RuntimeError, match="canUse32BitIndexMath"):
        metrics_of(workload, 7)


def test_on_a_simulated_gpu_validation_takes_larger_micro_batches_than_training(tmp_path: Path) -> None:
    """Without a backward pass 48 MiB hold many more samples."""

    def build() -> nn.Module:
        blocks = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
        return nn.Sequential(nn.Linear(5, 256), *blocks, nn.Linear(256, 3)).double()

    workload = make_workload(model=build, validation_data=points(6_000, seed=1))
    device = SimulatedDevice(load_profile("rtx-4090", user_dir=tmp_path), memory_budget="48MiB")
    loop = make_loop(workload, micro_batch=512, target_batch=512, steps=1, device=device)
    expected = metrics_of(workload, 512)
    with device.training() as meter:
        meter.count(tensor.data for tensor in loop.train_state.model.parameters())
        settings = {"device": device, "meter": meter, "target_batch": 24, "micro_batch": 2500}
        larger = Validator(workload, loop.train_state, grows=True, **settings)
        found = larger.run()
        assert meter.stats().peak_reserved_bytes <= device.budget_bytes
        assert larger.micro_batch == 5000
        loop.meter, loop.micro_batch = meter, larger.micro_batch
        loop.sampler = replace(loop.sampler, target_batch=larger.micro_batch)
        with suppress(RestartSmallerError):
            next(loop.run())
        assert loop.micro_batch < larger.micro_batch, "training fits fewer samples"
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_sanity_check_runs_two_samples_and_keeps_the_random_state() -> None:
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


def test_without_validation_data_there_are_no_metrics() -> None:
    assert metrics_of(make_workload(), 4) == {}


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), torch.tensor(-2.0)])
@pytest.mark.parametrize("name", ["loss", "share"])
def test_an_invalid_count_is_named(name: str, count) -> None:
    def wrong(model, batch):
        return Loss(mean_loss(model, batch), count)

    fields = {"loss": wrong} if name == "loss" else {"metrics": lambda *given: {name: wrong(*given)}}
    with pytest.raises(InputError, match=f"count of the validation metric '{name}' must be finite and at"):
        metrics_of(make_workload(validation_data=points(9), **fields), 4)


def workload(samples: int):
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).double()

    return make_workload(model=model, validation_data=points(samples, seed=5))


def validate(samples: int, micro_batch: int) -> tuple[float | None, bool]:
    """Return the loss over all ranks, and whether the model is in parts again."""
    group = open_group()
    loop = sharded_loop(group, workload(samples))
    settings = {"device": loop.device, "meter": SilentMeter(), "target_batch": 24}
    shared = Validator(
        loop.workload, loop.train_state, micro_batch=micro_batch, grows=True, ranks=group, **settings
    )
    found = shared.run()
    in_parts = all(hasattr(p, "to_local") for p in loop.train_state.model.parameters())
    group.close()
    return found["loss"], in_parts


@pytest.mark.distributed
# One rank has more samples than the other, or all of them.
@pytest.mark.parametrize(("samples", "micro_batch"), [(7, 2), (1, 2), (8, 3)])
def test_the_loss_is_that_of_one_process(server: RankServer, samples: int, micro_batch: int) -> None:
    model = make_loop(workload(samples)).train_state.model
    rows = torch.utils.data.default_collate(list(points(samples, seed=5)))  # type: ignore[arg-type]
    expected = float(mean_loss(model, rows).detach())
    for loss, in_parts in server.values(validate, samples, micro_batch):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert in_parts


def test_out_of_memory_in_a_shared_model_names_the_option_that_helps() -> None:
    loop = make_loop(make_workload(validation_data=points(4)))
    loop.train_state.shared = FullModel()
    settings = {"device": loop.device, "meter": SilentMeter(), "target_batch": 24, "micro_batch": 2}
    with pytest.raises(DoesNotFitError, match=r"micro-batch of 2, .* a smaller --validation-micro-batch"):
        Validator(loop.workload, loop.train_state, **settings).run()


class FullModel:
    """A shared model that runs out of memory."""

    def run(self, function: object, batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")
