"""The batches of data that draw: the same with and without the check of the loss, and after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autobatch import Workload
from tests.support.runs import fit, fit_until
from tests.support.training import Augmented, make_workload, network, points, weights

STEPS = 6
OPTIONS: dict[str, Any] = {"target_batch": 8, "max_micro_batch": 4, "steps": STEPS, "checkpoint_every": 4}
POINTS = points(40, dtype=torch.float32)


def shuffled() -> Iterator[Any]:
    """Draw points out of a buffer, in which every earlier draw shows."""
    buffer: list[Any] = []
    for point in POINTS:
        buffer.append(point)
        if len(buffer) > 10:
            yield buffer.pop(random.randrange(len(buffer)))


def of_stream() -> Workload:
    return make_workload(model=dropping, train_data=shuffled)


def of_loader() -> Workload:
    loader = DataLoader(Augmented(*POINTS.columns), batch_size=5, shuffle=True, num_workers=2)
    names = ("loss", "optimizer", "learning_rate")
    return Workload.from_loader(
        loader, model=dropping, **{name: getattr(make_workload(), name) for name in names}
    )


def dropping() -> nn.Module:
    return nn.Sequential(network(torch.float32), nn.Dropout(0.5))


def run(make: Callable[[], Workload], out: Path, **options: Any) -> tuple[Tensor, str]:
    """Fit; return the weights, and the states of all generators at the end."""
    result, _ = fit(make(), out, **{**OPTIONS, **options})
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()]
    return weights(result.model), repr(states)


@pytest.mark.parametrize("make", [of_stream, of_loader])
def test_the_check_changes_no_batch_and_draws_nothing_nor_does_a_resume(make: Any, tmp_path: Path) -> None:
    found, states = run(make, tmp_path / "checked")
    expected, others = run(make, tmp_path / "plain", split_check="off")
    assert torch.equal(found, expected)
    assert states == others, "as many numbers were drawn"
    fit_until(5, make(), tmp_path / "parts", **OPTIONS)
    assert torch.equal(run(make, tmp_path / "parts", resume=True)[0], found)
