"""Warm-up in samples: the weights of SGD by hand, for any batch, on top of any schedule, over a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import autobatch
from autobatch.core.errors import InputError
from tests.support.training import apart, make_loop, make_workload, mean_loss, points, weights


def halving(optimizer: torch.optim.Optimizer, _: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def by_hand(rates: list[float], batches: list[list[int]]) -> torch.Tensor:
    """Plain SGD over whole batches, with these learning rates."""
    loop = make_loop(make_workload())
    model, columns = loop.train_state.model, points().columns
    for rate, ids in zip(rates, batches, strict=True):
        model.zero_grad()
        mean_loss(model, [column[ids] for column in columns]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)
    return weights(model)


@pytest.mark.parametrize("schedule", [None, halving])
@pytest.mark.parametrize(("target", "steps"), [(24, 5), (7, 12)])
def test_the_rate_grows_with_the_samples_on_top_of_the_schedule(target, steps, schedule) -> None:
    workload = make_workload(schedule=schedule)
    loop = make_loop(workload, target_batch=target, steps=steps, warmup_samples=60)
    ids = [window.ids for window in loop.sampler.batches()]
    records = list(loop.run())
    plain = [0.1 * (0.5**step if schedule else 1.0) for step in range(steps)]
    expected = [rate * min(1.0, (step + 1) * target / 60) for step, rate in enumerate(plain)]
    assert [record.learning_rate for record in records] == pytest.approx(expected, rel=1e-15)
    assert apart(weights(loop.train_state.model), by_hand(expected, ids)) < 1e-12
    # What schedules and checkpoints see never knew of it.
    left = loop.train_state.optimizers[0].param_groups[0]["lr"]
    assert left == 0.1 * (0.5**steps if schedule else 1.0)


def test_after_an_error_too_the_rate_is_what_it_was(monkeypatch) -> None:
    loop = make_loop(make_workload(), warmup_samples=100)

    def failing(*_: object) -> None:
        raise ValueError("in the window")

    monkeypatch.setattr(loop, "_train_batch", failing)
    with pytest.raises(ValueError, match="in the window"):
        next(loop.run())
    assert loop.train_state.optimizers[0].param_groups[0]["lr"] == 0.1


def test_a_resumed_run_warms_up_on_and_not_otherwise(tmp_path: Path) -> None:
    def fit(out: str, steps: int, **more: object) -> autobatch.Result:
        return autobatch.fit(
            make_workload(), target_batch=8, device="cpu", trials=0, out=tmp_path / out, steps=steps, **more
        )

    whole = fit("whole", 6, warmup_samples=40)
    fit("parts", 2, warmup_samples=40)
    with pytest.raises(InputError, match=r"no --warmup-samples does not match .* which has 40"):
        fit("parts", 6, resume=True)
    parts = fit("parts", 6, resume=True, warmup_samples=40)
    assert weights(parts.model).equal(weights(whole.model))
