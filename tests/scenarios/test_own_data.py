"""Whole runs on a user's own loader or stream, against the same batches trained by hand."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import autobatch
from autobatch import InputError
from autobatch.workload.order import SamplerOrder
from tests.support.libraries import installed

SAMPLES = 20
DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(
    torch.randn(SAMPLES, 3, generator=DRAW, dtype=torch.float64),
    torch.randn(SAMPLES, generator=DRAW, dtype=torch.float64),
)
OPTIONS: dict[str, Any] = {"target_batch": 6, "device": "cpu", "trials": 0, "precision": "fp32"}


def build() -> nn.Module:
    return nn.Linear(3, 1, dtype=torch.float64)


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()


def sgd(params: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=learning_rate)


def weighted(*weights: float, workers: int = 0) -> autobatch.Workload:
    sampler = WeightedRandomSampler(weights * (SAMPLES // len(weights)), 15)
    loader = DataLoader(DATA, batch_size=4, sampler=sampler, num_workers=workers)
    return autobatch.Workload.from_loader(
        loader, model=build, loss=squares, optimizer=sgd, learning_rate=0.05
    )


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(batches: Iterable[Any], seed: int = 0) -> torch.Tensor:
    """Train on batches by hand, and return the weights."""
    torch.manual_seed(seed)
    model = build()
    optimizer = sgd(model.parameters(), 0.05)
    for batch in batches:
        optimizer.zero_grad()
        squares(model, batch).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batches_are_those_of_the_sampler(tmp_path: Path, workers: int) -> None:
    workload = weighted(1.0, 9.0, workers=workers)
    result = autobatch.fit(workload, steps=5, out=tmp_path / "run", max_micro_batch=4, seed=3, **OPTIONS)
    order = SamplerOrder(workload.sampler or (), SAMPLES, 3)
    drawn = [*order(0), *order(1)]
    expected = by_hand((DATA[drawn[6 * step : 6 * step + 6]] for step in range(5)), seed=3)
    assert result.plan is not None
    assert result.plan.accumulation_steps == 2
    assert torch.allclose(weights_of(result.model), expected, rtol=1e-12)


def test_a_resumed_run_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    whole = autobatch.fit(weighted(1.0, 9.0), steps=6, out=tmp_path / "whole", **OPTIONS)
    autobatch.fit(weighted(1.0, 9.0), steps=3, out=tmp_path / "parts", **OPTIONS)
    parts = autobatch.fit(weighted(1.0, 9.0), steps=6, out=tmp_path / "parts", resume=True, **OPTIONS)
    assert torch.equal(weights_of(parts.model), weights_of(whole.model))


def test_a_resume_with_another_sampler_is_refused(tmp_path: Path) -> None:
    autobatch.fit(weighted(1.0, 9.0), steps=1, out=tmp_path / "run", **OPTIONS)
    with pytest.raises(InputError, match=r"order of the sampler .* does not match the checkpoint"):
        autobatch.fit(weighted(9.0, 1.0), steps=2, out=tmp_path / "run", resume=True, **OPTIONS)


class Neighbours(NamedTuple):
    """What a sampler of torch_geometric draws for some nodes: they come first, then their neighbours."""

    nodes: Tensor
    seeds: int


class NodeLoader(DataLoader[Any]):
    """A loader of subgraphs that joins features after its collate function, as torch_geometric's does."""

    def __init__(self, filter_per_worker: bool) -> None:
        self.filter_per_worker = filter_per_worker
        super().__init__(range(SAMPLES), collate_fn=self.collate_fn, batch_size=4)  # type: ignore[arg-type]

    def collate_fn(self, index: list[int]) -> Any:
        drawn = torch.randint(SAMPLES, (len(index), 3))[torch.rand(len(index), 3) < 0.5]
        found = Neighbours(torch.cat([torch.tensor(index), drawn]), len(index))
        return self.filter_fn(found) if self.filter_per_worker else found

    def filter_fn(self, found: Neighbours) -> dict[str, Any]:
        inputs, targets = DATA.tensors
        return {"x": inputs[found.nodes], "y": targets[found.nodes], "batch_size": found.seeds}


@pytest.mark.parametrize("filter_per_worker", [True, False])
def test_nodes_with_neighbours_drawn_at_random_are_trained(tmp_path: Path, filter_per_worker: bool) -> None:
    """Neighbours take memory and add nothing to the loss, so that batches by hand have the same weights."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        size, found = batch["batch_size"], model(batch["x"])[:, 0]
        return (found[:size] - batch["y"][:size]).square().mean()

    workload = autobatch.Workload.from_loader(
        NodeLoader(filter_per_worker), model=build, loss=loss, optimizer=sgd, learning_rate=0.05
    )
    result = autobatch.fit(workload, steps=5, out=tmp_path / "run", memory_budget="4KiB", **OPTIONS)
    expected = by_hand(DATA[[(6 * step + at) % SAMPLES for at in range(6)]] for step in range(5))
    assert torch.allclose(weights_of(result.model), expected, rtol=1e-12)


def test_the_averaged_weights_of_a_schedule_free_optimizer_are_validated_and_exported(
    tmp_path: Path,
) -> None:
    """The oracle trains by hand as the library documents it: train() around steps, eval() after them."""
    library = installed("schedulefree")

    def optimizer(params: Any, learning_rate: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = library.SGDScheduleFree(params, lr=learning_rate)
        return made

    workload = autobatch.Workload(
        model=build,
        train_data=DATA,
        sampler=range(SAMPLES),
        validation_data=DATA,
        loss=squares,
        optimizer=optimizer,
        learning_rate=0.1,
    )
    result = autobatch.fit(
        workload, steps=6, out=tmp_path / "run", max_micro_batch=4, validate_every=2, **OPTIONS
    )
    torch.manual_seed(0)
    model = build()
    made: Any = optimizer(model.parameters(), 0.1)
    made.train()
    for step in range(6):
        ids = [(6 * step + place) % SAMPLES for place in range(6)]
        made.zero_grad()
        squares(model, [tensor[ids] for tensor in DATA.tensors]).backward()
        made.step()
    trained = weights_of(model).clone()
    made.eval()
    assert not torch.allclose(trained, weights_of(model))
    assert torch.allclose(weights_of(result.model), weights_of(model), rtol=1e-12)
    exported = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.allclose(exported["weight"], model.weight, rtol=1e-12)
    assert result.training is not None
    expected = float(squares(model, DATA.tensors).detach())
    assert result.training.validation["loss"] == pytest.approx(expected, rel=1e-12)
    parts = {"out": tmp_path / "parts", "max_micro_batch": 4, **OPTIONS}
    autobatch.fit(workload, steps=4, **parts)
    assert torch.equal(
        weights_of(autobatch.fit(workload, steps=6, resume=True, **parts).model), weights_of(result.model)
    )


# Streams.

POINTS = torch.randn(20, 4, generator=DRAW, dtype=torch.float64)


class Stream(IterableDataset[Any]):
    """Points, each with its target."""

    def __init__(self, *, endless: bool = False) -> None:
        self.endless = endless

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for row in POINTS:
                yield row[:3], row[3]
            if not self.endless:
                return


class Stateful(Stream):
    """Points that know their place."""

    place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.place < len(POINTS):
            row = POINTS[self.place]
            self.place += 1
            yield row[:3], row[3]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def workload(stream: Any, **fields: Any) -> autobatch.Workload:
    return autobatch.Workload(
        model=build, train_data=stream, loss=squares, optimizer=sgd, learning_rate=0.05, **fields
    )


def rows(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a stream that begins anew at its end."""
    for step in range(steps):
        batch = torch.stack([POINTS[(6 * step + place) % len(POINTS)] for place in range(6)])
        yield batch[:, :3], batch[:, 3]


@pytest.fixture
def scan(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what sets the number of samples that a plan looks at."""
    return lambda samples: monkeypatch.setattr("autobatch.workload.streams.SCAN", samples)


@pytest.mark.parametrize("endless", [False, True])
def test_steps_need_no_end_of_the_stream(tmp_path: Path, endless: bool, scan: Any) -> None:
    scan(8)
    result = autobatch.fit(
        workload(Stream(endless=endless)), steps=5, max_micro_batch=4, out=tmp_path / "run", **OPTIONS
    )
    assert result.training is not None
    assert (result.training.optimizer_steps, result.training.samples) == (5, 30)
    assert torch.allclose(weights_of(result.model), by_hand(rows(5)), rtol=1e-12)


def test_epochs_end_with_the_stream_and_the_last_batch_is_weighted_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scan: Any
) -> None:
    scan(8)
    with caplog.at_level(logging.INFO, logger="autobatch"):
        result = autobatch.fit(
            workload(Stream()), epochs=2, max_micro_batch=4,
            out=tmp_path / "run", **OPTIONS,
        )  # fmt: skip
    assert "so the stream is read once to its end" in caplog.text
    assert "this is planned from its first 8 samples" in caplog.text
    twice = torch.cat([POINTS, POINTS])
    batches = twice.split(6)
    assert result.training is not None
    counts = len(batches), sum(map(len, batches))
    assert (result.training.optimizer_steps, result.training.samples) == counts
    expected = by_hand((one[:, :3], one[:, 3]) for one in batches)
    assert torch.allclose(weights_of(result.model), expected, rtol=1e-12)


def test_a_stream_that_a_plan_has_read_to_its_end_is_planned_as_data_and_an_empty_one_is_refused() -> None:
    found = autobatch.plan(workload(Stream()), target_batch=6, device="cpu", max_micro_batch=4)
    assert not [note for note in found.notes if "planned from" in note]
    with pytest.raises(InputError, match="has 0 samples: at least 1 is needed"):
        autobatch.plan(workload(lambda: iter([])), target_batch=6, device="cpu")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Stream, "so its first 4 samples were read again and skipped"),
        (Stateful, "the stream continues from its own state"),
    ],
)
def test_a_resumed_run_has_the_same_weights_and_says_how_it_found_its_place(
    tmp_path: Path, kind: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = autobatch.fit(workload(kind()), steps=6, out=tmp_path / "whole", **OPTIONS)
    autobatch.fit(workload(kind()), steps=4, out=tmp_path / "parts", **OPTIONS)
    with caplog.at_level(logging.INFO, logger="autobatch"):
        parts = autobatch.fit(workload(kind()), steps=6, out=tmp_path / "parts", resume=True, **OPTIONS)
    assert torch.equal(weights_of(parts.model), weights_of(whole.model))
    assert torch.allclose(weights_of(whole.model), by_hand(rows(6)), rtol=1e-12)
    assert words in "\n".join(caplog.messages)


# Batches that the data make.


def by_step(size: int, step: int) -> tuple[Tensor, ...]:
    ids = torch.randint(SAMPLES, (size,), generator=torch.Generator().manual_seed(step))
    return tuple(tensor[ids] for tensor in DATA.tensors)


def by_draws(size: int, step: int) -> dict[int, Any]:
    """Draw with the default generators, as nanoGPT does, into another container."""
    ids = torch.randint(SAMPLES, (size,))
    noise = np.random.rand(size) + random.random()
    return {0: DATA.tensors[0][ids], 1: DATA.tensors[1][ids] + torch.from_numpy(noise)}


def test_a_batch_function_is_asked_once_per_step_and_trained_as_one_whole_batch(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def noted(size: int, step: int) -> tuple[Tensor, ...]:
        asked.append((size, step))
        return by_step(size, step)

    found = autobatch.fit(
        workload(autobatch.BatchFunction(noted)), steps=5, max_micro_batch=4, out=tmp_path / "run", **OPTIONS
    )
    assert found.plan is not None
    assert found.plan.accumulation_steps == 2
    assert asked[-5:] == [(6, step) for step in range(5)]
    expected = by_hand(by_step(6, step) for step in range(5))
    assert torch.allclose(weights_of(found.model), expected, rtol=1e-12)


def test_draws_of_a_batch_function_depend_on_the_seed_and_the_step_alone(tmp_path: Path) -> None:
    def fit(steps: int, out: str, **options: Any) -> Tensor:
        data = workload(autobatch.BatchFunction(by_draws))
        options |= {"max_micro_batch": 4, "out": tmp_path / out, **OPTIONS}
        return weights_of(autobatch.fit(data, steps=steps, **options).model)

    whole = fit(5, "whole")
    fit(2, "parts")
    assert torch.equal(fit(5, "parts", resume=True), whole)
    assert not torch.equal(fit(5, "other", seed=1), whole)


@pytest.mark.parametrize("device", ["cpu", "sim:t4"])
def test_the_limit_is_that_of_the_same_samples_with_an_index(device: str, scan: Any) -> None:
    scan(64)
    budget = {"cpu": "3KiB", "sim:t4": "4MiB"}[device]
    wide = torch.randn(64, 3 if device == "cpu" else 3000, dtype=torch.float64)

    def probe(data: Any) -> tuple[int, str]:
        found = autobatch.probe(
            autobatch.Workload(
                model=lambda: nn.Linear(wide.shape[1], 1, dtype=torch.float64),
                train_data=data, loss=squares, optimizer=sgd, learning_rate=0.05,
            ),
            device=device, memory_budget=budget,
        )  # fmt: skip
        return found.micro_batch, found.limited_by

    indexed = probe(TensorDataset(wide, torch.zeros(64)))
    assert indexed[1] == "memory"
    assert probe(autobatch.BatchFunction(lambda size, step: (wide[:size], torch.zeros(size)))) == indexed
