"""The life of a micro-batch: it ends with the forward pass wherever steps run, and the limit counts on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autobatch
from autobatch import WholeBatchLoss, Workload
from autobatch.core.units import MiB
from autobatch.estimates.traced_step import record
from autobatch.rehearsal.rehearsal import attempt
from tests.scenarios.test_probed_limits import survives
from tests.support.step_workloads import traced_step
from tests.support.training import make_loop, make_setup, make_workload, network, points

TARGETS, BUDGET = 1500, 12 * MiB


class Lives:
    """A loss that never saves its micro-batch for the backward pass, and counts those alive there."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        # Also at the joint: when a micro-batch begins, none before it is left.
        self._count()
        self.seen.append(weakref.ref(batch[0]))
        outputs = model(batch[0] + 1.0)
        outputs.register_hook(lambda _: self._count())
        return outputs

    def mean(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.forward(model, batch).square().mean()

    def _count(self) -> None:
        self.alive.append(sum(ref() is not None for ref in self.seen))


RUNS: dict[str, Callable[[Workload], object]] = {
    "loop": lambda workload: [*make_loop(workload).run()],
    "attempt": lambda workload: attempt(make_setup(workload), 5),
    "trace": lambda workload: record(traced_step(make_setup(workload), capability=(9, 0)), 5),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("kind", ["mean", "whole"])
def test_no_micro_batch_outlives_its_forward_pass(run: Callable[[Workload], object], kind: str) -> None:
    lives = Lives()
    whole = WholeBatchLoss(represent=lives.forward, loss=lambda _, rows: rows.square().mean())
    workload = make_workload(
        model=lambda: network(torch.float32),
        train_data=points(dtype=torch.float32),
        loss=whole if kind == "whole" else lives.mean,
    )
    assert run(workload)
    # Each forward pass counts those before its own, each backward pass its own as well.
    assert len(lives.alive) >= 2 * 3
    assert set(lives.alive) == {0}


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, TARGETS), *(nn.GELU() for _ in range(10))
    )


def test_a_plan_for_a_loop_by_hand_counts_the_micro_batch_that_it_keeps() -> None:
    workload = make_workload(
        model=autoencoder,
        train_data=[(torch.zeros(16), torch.zeros(TARGETS))] * 200,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )
    plan = autobatch.plan(workload, target_batch=200, progress=False, device="cpu", memory_budget=BUDGET)
    limit = plan.probe.micro_batch
    assert 50 < limit < 200
    setup = make_setup(workload, BUDGET)
    assert survives(setup, limit, 3, holds_batch=True)
    assert not survives(setup, limit + 2, 3, holds_batch=True)
