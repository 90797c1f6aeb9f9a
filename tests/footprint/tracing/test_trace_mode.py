"""The values that a recorder supplies, and the sizes of operators that hide theirs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autobatch.device.allocator.trace import FREE, replay
from autobatch.footprint.fit import footprint
from autobatch.footprint.tracing.fakes import new_mode
from autobatch.footprint.tracing.trace_mode import Recorder
from autobatch.footprint.tracing.trace_step import record
from autobatch.setup.attempt import ATTEMPT_STEPS, attempt
from tests.support.step_workloads import WORKLOADS, make, perceptron, setting, setup


def test_fp16_steps_without_an_overflow():
    """The loss scale reads values that do not exist, and the optimizer must step."""
    one = setup(WORKLOADS["transformer"](), precision="fp16")
    found = record(setting(one, capability=(8, 0), steps=(1,)), 2)
    state = sum(
        size
        for block, size in found.trace.events
        if size != FREE and found.labels[block].kind == "optimizer state"
    )
    assert state == 2 * sum(p.nbytes for p in one.model.parameters())


@pytest.mark.parametrize(
    "select",
    [
        lambda y, keep: y[keep],
        lambda y, keep: torch.masked_select(y, keep[:, None]).view(-1, 5),
        lambda y, keep: y[keep.nonzero()[:, 0]],
    ],
)
def test_a_selection_keeps_everything(select):
    def loss(model, batch):
        y, keep = model(batch[0]), batch[1] >= 0
        return F.cross_entropy(select(y, keep), batch[1][keep])

    one = setup(make(perceptron, loss=loss))
    step = footprint(setting(one, steps=ATTEMPT_STEPS))
    assert "selection" in step.notes[0]
    ran = attempt(one, 7).attempt.peak_allocated_bytes
    assert ran <= replay(step.program.at(7), one.device.new_allocator()).peak_allocated_bytes <= 1.1 * ran


def recorded(run) -> Recorder:
    """Return the recorder of a function that runs on fakes, as on a CPU."""
    recorder = Recorder(on_gpu=False)
    with new_mode(), recorder:
        recorder.mark("forward")
        run(recorder)
    return recorder


def test_blocks_are_labelled_by_phase_module_and_kind():
    def run(recorder):
        recorder.modules.append("body")
        x = torch.empty(10)
        recorder.modules.pop()
        recorder.mark("backward")
        y = x + 1
        recorder.label("gradients", [y])
        return x, y

    found = recorded(run).recording()
    assert [tuple(label) for label in found.labels] == [("activations", "body"), ("gradients", "")]
    assert [size for _, size in found.trace.events if size != FREE] == [40, 40]
    assert not found.has_convolutions
    assert not found.has_selections


def test_an_update_in_place_returns_its_target_and_takes_no_memory():
    def run(_):
        x, y = torch.empty(4, 2), torch.empty(2)
        assert x.add_(y) is x
        assert x.lerp_(y, 0.5).addcmul_(x, y).copy_(y) is x
        y.mul_(2.0)
        assert x.resize_(3).shape == (3,)
        assert x.unsqueeze_(0).shape == (1, 3)

    found = recorded(run).recording()
    assert [size for _, size in found.trace.events if size != FREE] == [32, 8]


def test_values_let_a_step_succeed():
    answers = []

    def run(_):
        x = torch.ones(3)
        answers.extend([x.sum().item(), (x > 0).all().item(), torch.ones(3, dtype=torch.int64).sum().item()])

    recorded(run)
    assert answers == [0.5, False, 1]


def test_a_repetition_is_refused_if_memory_has_grown():
    kept, answers = [], []

    def steps(grows: bool):
        def run(recorder):
            held = torch.empty(8)
            since = recorder.bookmark()
            recorder.mark("forward")
            held = torch.empty(8)
            if grows:
                kept.append(torch.empty(4))
            recorder.settle()
            answers.append(recorder.repeat(since))
            return held

        return run

    found = recorded(steps(grows=False)).recording()
    recorded(steps(grows=True))
    assert answers == [True, False]
    # A step is the allocation of 32 bytes and the free of the ones before; it was run once and added once.
    assert [size for _, size in found.trace.events] == [32, 32, FREE, 32]
    assert len(found.labels) == 3
    assert [phase for _, phase in found.trace.marks] == ["forward", "forward", "forward"]
