"""Workspaces of recurrent layers on the CPU, against those of layers that really run."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from autobatch import Workload
from autobatch.device.allocator import onednn_workspace
from autobatch.device.allocator.onednn_workspace import PAGE, PARTS, Workspaces, whole_pages
from autobatch.device.allocator.trace import replay
from autobatch.footprint.fit import footprint
from autobatch.rehearsal.attempt import attempt
from tests.support.step_workloads import setting, setup

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def call(
    steps: int, samples: int, features: int, hidden: int, *, train: bool = True, dtype=torch.float32
) -> tuple[object, ...]:
    zeros = partial(torch.zeros, dtype=dtype)
    weights = zeros(4 * hidden, features), zeros(4 * hidden, hidden)
    biases = zeros(4 * hidden), zeros(4 * hidden)
    state = zeros(samples, hidden)
    switches = (False, [], 2, hidden, 1, True, False, False, train)
    return zeros(steps, samples, features), *weights, *biases, state, state, *switches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(1, 300), st.integers(1, 260), st.integers(1, 130))
def test_a_workspace_is_predicted_to_the_byte(dtype, steps, samples, features, hidden):
    args = call(steps, samples, features, hidden, dtype=dtype)
    assert whole_pages(Workspaces().parts_of(args)) == LAYER(*args)[3].numel()


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(1, 300), st.integers(1, 5), st.integers(1, 5))
def test_a_workspace_of_another_layout_is_bounded(steps, samples, features, hidden):
    args = call(steps, samples, 16 * features, 16 * hidden)
    with patch.object(onednn_workspace, "_parts", lambda *_: (1,)):
        found = whole_pages(Workspaces().parts_of(args))
    kept = LAYER(*args)[3].numel()
    assert kept <= found <= kept + PARTS * PAGE


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(16, 32, num_layers=2, bidirectional=True), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0].mean(dim=1))


def test_a_step_with_recurrent_layers_is_predicted_to_the_byte():
    workload = Workload(
        model=Recurrent,
        train_data=[(torch.ones(6, 16), index % 4) for index in range(64)],
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
        learning_rate=1e-3,
    )
    here = setup(workload)
    step = footprint(setting(here, steps=(1, 2, 2)))
    for size in (2, 7, 40):
        real = attempt(here, size).attempt.peak_allocated_bytes
        predicted = replay(step.program.at(size), here.device.new_allocator()).peak_allocated_bytes
        assert predicted == real
