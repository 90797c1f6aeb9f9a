"""The trace of a step on fake tensors, against the events of a real attempt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autobatch import Loss, Workload
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.trace import replay
from autobatch.estimates.traced_step import Unpredictable, footprint, record
from autobatch.rehearsal.rehearsal import attempt
from tests.support.step_workloads import WORKLOADS, make, perceptron, setup, traced_step
from tests.support.untouched import fingerprint, with_gradients


def loss_of_elements(name: str) -> Callable[..., Tensor]:
    """Return a loss whose result has a storage as large as its input."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        y = model(batch[0]).sigmoid()
        return getattr(F, name)(y, torch.zeros_like(y).expand(y.shape))

    return loss


def loss_of_samples(model: nn.Module, batch: Any) -> Tensor:
    chosen = torch.distributions.Normal(model(batch[0]), torch.ones(5))
    return -chosen.log_prob(chosen.rsample().detach()).mean()


def several_terms(model: nn.Module, batch: Any) -> dict[str, Tensor | Loss]:
    """Two terms with counts, one of which a GPU would keep, and a mean."""
    scores = model(batch[0]).flatten(1)
    return {
        "large": Loss(scores[:, :4].square().sum(), torch.tensor(float(len(scores)))),
        "all": Loss(scores.abs().sum(), float(len(scores))),
        "pull": scores.mean(),
    }


CASES: dict[str, tuple[Callable[[], Workload], str]] = {
    **{f"{name} {precision}": (made, precision)
        for name, made in WORKLOADS.items()
        for precision in ("fp32", "bf16")
        if (name, precision) != ("convolutions", "bf16")},
    "perceptron fp16": (WORKLOADS["perceptron"], "fp16"),
    **{name: (partial(make, perceptron, loss=loss_of_elements(name)), "fp32")
        for name in ("mse_loss", "binary_cross_entropy")},
    "several terms": (partial(make, perceptron, loss=several_terms,
        counts=lambda batch: dict.fromkeys(("large", "all"), len(batch[0]))), "fp32"),
    "distribution": (partial(make, perceptron, loss=loss_of_samples), "fp32"),
    "rate in a tensor": (partial(make, perceptron, optimizer=lambda parameters, rate: torch.optim.Adam(
        parameters, lr=torch.tensor(rate))), "fp32"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_allocates_what_a_real_attempt_does(name: str) -> None:
    workload, precision = CASES[name]
    made = setup(workload(), precision=precision)
    ran = attempt(made, 5).trace
    found = record(traced_step(made), 5).trace
    # Batches are placed before the mark of a phase, so the ends of both differ in frees.
    assert found.events == ran.events[: len(found.events)]
    for allocator in (Allocator, CachingAllocator):
        peaks = [replay(trace, allocator()) for trace in (found, ran)]
        assert peaks[0].peak_allocated_bytes == peaks[1].peak_allocated_bytes
        assert peaks[0].peak_reserved_bytes == peaks[1].peak_reserved_bytes
    assert record(traced_step(made, capability=(8, 0)), 7).trace.events


@pytest.mark.parametrize(
    "select",
    [
        lambda y, keep: y[keep],
        lambda y, keep: torch.masked_select(y, keep[:, None]).view(-1, 5),
        lambda y, keep: y[keep.nonzero()[:, 0]],
    ],
)
def test_a_selection_keeps_everything(select) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        y, keep = model(batch[0]), batch[1] >= 0
        return F.cross_entropy(select(y, keep), batch[1][keep])

    one = setup(make(perceptron, loss=loss))
    step = footprint(traced_step(one))
    assert "selection" in step.notes[0]
    ran = attempt(one, 7).attempt.peak_allocated_bytes
    assert (
        ran
        <= replay(step.program.at(7), Allocator(one.device.budget_bytes)).peak_allocated_bytes
        <= 1.1 * ran
    )


@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_a_trace_asks_no_gpu(capability, monkeypatch) -> None:
    """Torch's optimizers ask the current stream whether a graph captures it, which opens a context."""

    def asked(_: Any) -> None:
        raise AssertionError("a step on fakes asked a GPU")

    monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", asked)
    one = setup(WORKLOADS["transformer"]())
    assert record(traced_step(one, capability=capability), 2).trace.events


def test_small_traces_give_large_ones() -> None:
    one = traced_step(setup(WORKLOADS["transformer"](), precision="fp16"), capability=(8, 0))
    expected, found = record(one, 64).trace, footprint(one).program.at(64)
    assert (found.events, found.marks) == (expected.events, expected.marks)


def test_a_trace_leaves_model_and_random_states_unchanged() -> None:
    one = setup(WORKLOADS["transformer"]())
    with_gradients(one.model)
    before = fingerprint(one.model)
    record(traced_step(one, capability=(8, 0)), 2)
    assert fingerprint(one.model) == before


def case(forward: Callable[[Tensor], Tensor]) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(432, 5)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self.layer(x.flatten(1)))

    return traced_step(setup(make(Model)), capability=(8, 0))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda y: y * len(torch.unique(y)), "unique.*values of the data"),
        (lambda y: y * sum(y.untyped_storage().tolist()), "does not run without values"),
        (lambda y: y * float(y.detach().numpy().sum()), "does not run without values"),
        (lambda y: torch.cat([y, y[: len(y) // 2]])[: len(y)], "no rule|no line"),
        (lambda y: torch.cat([(y @ y.T).flatten(), y.flatten()]).square().mean() * y, "no line"),
    ],
)
def test_an_unpredictable_step_has_a_reason_in_one_line(forward, words) -> None:
    with pytest.raises(Unpredictable, match=words) as caught:
        footprint(case(forward))
    assert "\n" not in str(caught.value)
