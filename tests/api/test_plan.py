"""Probes and plans through the library: what they find, note and refuse before minutes are spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autobatch
from autobatch import InputError
from tests.support.probes import Listener, mlp, work
from tests.support.ragged import ragged_workload
from tests.support.step_workloads import transformer
from tests.support.training import contrastive_loss, make_workload, mean_loss

CPU: dict[str, Any] = {"device": "cpu", "memory_budget": "2MiB"}


def plan(workload: Any, target_batch: int = 64, **options: Any) -> tuple[Any, list[str]]:
    heard = Listener()
    return autobatch.plan(
        workload, target_batch=target_batch, progress=heard, **{**CPU, **options}
    ), heard.notes


def test_the_memory_of_a_plan_is_that_of_its_runs_also_from_a_saved_limit(tmp_path: Path) -> None:
    options = {**CPU, "target_batch": 64, "trials": 0, "steps": 1}
    found, again = (
        autobatch.fit(transformer(depth=3), out=tmp_path / name, **options) for name in ("first", "again")
    )
    ran = {one.micro_batch: one.peak_allocated_bytes for one in found.probe.attempts if one.fits}
    totals = [sum(sizes) for sizes in zip(*found.memory_curve.categories.values(), strict=True)]
    assert max(totals) == ran[found.probe.micro_batch]
    assert (found.probe.source, again.probe.source[:6]) == ("search", "saved ")
    assert again.memory_curve == found.memory_curve


def test_a_probe_and_a_plan_have_the_fields_of_their_records_and_the_device() -> None:
    found = autobatch.probe(work(), device="cpu", memory_budget="80KiB")
    assert found.device.budget_bytes == 80 * 1024
    assert found.micro_batch == max(one.micro_batch for one in found.attempts if one.fits)
    made, _ = plan(work(), 100, memory_budget="80KiB")
    assert (sum(made.micro_batches), made.device) == (100, found.device)
    # A loop by hand keeps its micro-batch.
    assert max(made.micro_batches) <= made.probe.micro_batch <= found.micro_batch


@pytest.mark.parametrize(
    ("options", "launched", "world", "share"),
    [({}, None, 1, 64), ({}, "4", 4, 16), ({"world_size": 3}, "4", 3, 22)],
)
def test_a_plan_is_for_the_ranks_that_were_asked_for_or_launched(
    options: dict[str, Any], launched: str | None, world: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched is not None:
        monkeypatch.setenv("WORLD_SIZE", launched)
    found, _ = plan(make_workload(), max_micro_batch=5, **options)
    assert (found.world_size, sum(found.micro_batches), found.target_batch) == (world, share, 64)
    # A rank is not probed beyond its share.
    if world == 4:
        found, _ = plan(make_workload(), 8)
        assert (found.probe.micro_batch, found.probe.limited_by) == (2, "target_batch")


@pytest.mark.parametrize(
    ("workload", "options", "said"),
    [
        (lambda: work(lambda: nn.Sequential(nn.LazyLinear(4))), {}, "the model has a lazy module"),
        (ragged_workload, {"world_size": 2, "split": "size"}, "--split size needs the sizes of all samples"),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused(workload: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan(workload(), 24, **options)


def test_a_plan_notes_a_loss_that_cannot_be_split() -> None:
    for loss, is_told in ((contrastive_loss, True), (mean_loss, False)):
        _, notes = plan(make_workload(loss=loss), 24, max_micro_batch=8)
        assert any("the gradient of" in note for note in notes) == is_told


def test_a_plan_for_the_ranks_of_another_loop_is_by_count() -> None:
    found, _ = plan(ragged_workload(), 24, world_size=2)
    assert (found.split, found.size_cut) == ("count", None)


def test_a_resume_with_another_type_of_gradients_plans_again(tmp_path: Path) -> None:
    def half_loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    workload = work(lambda: mlp().bfloat16(), loss=half_loss)
    common: dict[str, Any] = {"target_batch": 32, "max_micro_batch": 4, "trials": 0, "checkpoint_every": 1}
    found = [
        autobatch.fit(
            workload, steps=steps, gradient_dtype=dtype, resume=steps > 1, out=tmp_path, **CPU, **common
        )
        for steps, dtype in ((1, "weights"), (2, "weights"), (3, "auto"))
    ]
    assert [one.plan.gradient_dtype for one in found] == ["weights", "weights", "fp32"]
    assert found[-1].training.optimizer_steps == 3
