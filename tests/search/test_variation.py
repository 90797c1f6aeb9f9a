"""Memory that varies at random, told from the events of one attempt."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from autobatch.search.variation import variation_of
from autobatch.setup.attempt import attempt
from tests.support.probes import WIDTH, probed, work
from tests.support.step_workloads import WORKLOADS, setup


class Nodes(Dataset):
    """Seed nodes of a graph, whose neighbours are drawn when they are collated."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        return index


def neighbourhood(seeds: list[int]) -> Tensor:
    return torch.ones(len(seeds) * 4 + random.randrange(4 * len(seeds)), WIDTH)


def draws() -> dict[str, object]:
    return {
        "train_data": Nodes(),
        "collate": neighbourhood,
        "loss": lambda model, x: model(x).square().mean(),
    }


def test_memory_that_varies_from_draw_to_draw_is_said_with_its_share() -> None:
    result, listener = probed(work(lambda: nn.Linear(WIDTH, 64), **draws()), memory_budget="300KiB")
    assert 0.01 < result.probe.memory_variation < 2
    said = [note for note in listener.notes if "memory varies" in note]
    assert len(said) == 1
    assert f"{result.probe.memory_variation:.1%}" in said[0]


@pytest.mark.parametrize("name", ["perceptron", "transformer"])
def test_equal_micro_batches_of_other_workloads_do_not_vary(name: str) -> None:
    trace = attempt(setup(WORKLOADS[name]()), 3).trace
    assert trace is not None
    assert variation_of(trace) is None


def test_events_without_phases_say_nothing() -> None:
    trace = attempt(setup(WORKLOADS["perceptron"]()), 3).trace
    assert trace is not None
    assert variation_of(type(trace)(trace.events)) is None
