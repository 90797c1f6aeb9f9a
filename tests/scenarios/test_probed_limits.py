"""Probed limits against attempts at every size, and against training at them and at those of plans."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autobatch
from autobatch import Loss
from autobatch.core.options import Options
from autobatch.rehearsal import rehearsal as attempts
from autobatch.rehearsal.rehearsal import attempt
from autobatch.rehearsal.setup import Setup, open_setup
from tests.support.probes import WIDTH, mlp, vectors, work
from tests.support.ragged import Sequences, ragged_workload, wide_model
from tests.support.training import amsgrad, contrastive_loss

# Brute force.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(4, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(len(x), 4, 4))[0][:, -1])


# Under CUDA's allocator the smallest budget is a segment of 2 MiB.
CASES = {
    "pairs": (work(loss=contrastive_loss), "cpu", "48KiB"),
    "lstm": (work(Recurrent), "cpu", "100KiB"),
    "mlp on a GPU": (work(lambda: mlp(4096)), "sim:t4", "4MiB"),
    "convolutions on a GPU": (
        work(
            lambda: nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 32, 3), nn.Flatten(),
                                  nn.Linear(32 * 144, 4)),
            train_data=vectors(200, 256),
            loss=lambda m, b: functional.cross_entropy(m(b[0].view(-1, 1, 16, 16)), b[1]),
        ),
        "sim:t4",
        "6MiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_attempts_at_other_sizes_agree_with_a_probe(case: str) -> None:
    """The answer fits, and none of the next sizes does."""
    workload, device, budget = CASES[case]
    setup = open_setup(workload, Options(device=device, memory_budget=budget))
    found = autobatch.probe(workload, device=device, memory_budget=budget)
    answer = found.micro_batch
    sizes = [*range(1, answer, max(1, answer // 6)), *range(answer, answer + 6)]
    fits = {size: attempt(setup, size).attempt.fits for size in sizes}
    assert fits[answer]
    assert found.limited_by == "memory"
    assert not any(fits[size] for size in sizes if size > answer)
    ran = {attempt.micro_batch: attempt.fits for attempt in found.attempts}
    assert ran[answer], "the answer itself ran"
    assert all(fits[size] == fit for size, fit in ran.items() if size in fits)


# Training at the limit.


def survives(setup: Setup, size: int, steps: int, *, holds_batch: bool = False) -> bool:
    """Train on random samples in a loop of plain torch, which shares no code with an attempt."""
    generator = torch.Generator().manual_seed(0)
    data, workload = setup.workload.train_data, setup.workload
    collate = workload.collate or torch.utils.data.default_collate
    with setup.device.session(is_probe=True) as meter:
        model = workload.model()
        optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
        try:
            for _ in range(steps):
                for _ in range(2):
                    with meter.uncounted():
                        ids = torch.randint(len(data), (size,), generator=generator).tolist()
                        batch = collate([data[index] for index in ids])
                    meter.count(batch)
                    loss = workload.loss(model, batch)
                    total = loss.total if isinstance(loss, Loss) else loss
                    # As in a step, only what autograd needs is alive from here on.
                    del loss
                    if not holds_batch:
                        del batch
                    total.backward(torch.full_like(total, 0.5))
                    del total
                optimizer.step()
                optimizer.zero_grad()
        except torch.OutOfMemoryError:
            return False
    return True


def deep() -> nn.Module:
    """Build many blocks of up to 1 MiB, for which CUDA's allocator takes segments of 2 MiB rather than 20."""
    layers = [layer for _ in range(7) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Linear(WIDTH, 256), *layers, nn.Linear(256, 4))


@pytest.mark.parametrize(
    ("device", "model", "budget", "steps"),
    [("cpu", lambda: mlp(2048), "1300KiB", 20), ("sim:t4", deep, "12MiB", 4)],
    ids=["cpu", "sim"],
)
def test_a_limit_leaves_room_for_state_that_the_first_step_makes(
    device, model, budget, steps, monkeypatch
) -> None:
    """Activations are tiny and AdamW has three states, so that a single step fits where training does not."""
    workload = work(model, optimizer=amsgrad, train_data=vectors(3000))
    setup = open_setup(workload, Options(device=device, memory_budget=budget))
    found = autobatch.probe(workload, device=device, memory_budget=budget).micro_batch
    assert survives(setup, found, steps)
    # The mutant: the activations are gone when the first step makes the state.
    monkeypatch.setattr(attempts, "ATTEMPT_STEPS", (1,))
    monkeypatch.setattr(attempts, "OTHER_ATTEMPT_STEPS", (1,))
    too_large = found + max(1, found // 4)
    assert attempt(setup, too_large).attempt.fits
    assert not survives(setup, too_large, steps=3)


@pytest.mark.parametrize("size_of", [None, lambda sample: len(sample[0])], ids=["scan", "size_of"])
def test_random_samples_of_different_lengths_train_at_the_limit(size_of) -> None:
    """Few samples are as long as the longest, and those do not come first."""
    workload = ragged_workload(model=wide_model, train_data=Sequences(240, 61), size_of=size_of)
    budget = {"device": "cpu", "memory_budget": "3MiB"}
    found = autobatch.probe(workload, **budget)
    setup = open_setup(workload, Options(**budget))
    assert 2 <= found.micro_batch < 60
    assert survives(setup, found.micro_batch, steps=40)
