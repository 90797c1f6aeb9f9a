"""Training of a plan from its check to its export, resumed on the same hardware or on other hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Training
from autobatch.planning import make_plan
from autobatch.training.build import build_sampler
from autobatch.training.checkpoints.load import load_newest
from autobatch.training.train_plan import PreparedRun, Resume, train_plan
from tests.support.options import as_options
from tests.support.runs import settings
from tests.support.training import (
    apart,
    contrastive_loss,
    make_setup,
    make_workload,
    mean_loss,
    network,
    reference,
    weights,
)

KEY = {"device": "cpu"}


class Notes(Progress):
    """Progress that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def plan_of(limit: int = 3, **changes: Any) -> Plan:
    plan = make_plan(target_batch=7, micro_batch_limit=limit, learning_rate=0.1)
    return msgspec.structs.replace(plan, **changes)


def trained(
    out: Path,
    workload=None,
    *,
    plan: Plan | None = None,
    steps: int = 4,
    resume: Resume | None = None,
    split_check: str = "error",
    **loop: Any,
) -> tuple[Training, nn.Module, list[str]]:
    given = {"target_batch": 7, "steps": steps, "seed": 3, "split_check": split_check, **loop}
    asked = as_options("fit", **given)
    progress = Notes()
    record, model = train_plan(
        PreparedRun(
            setup=make_setup(workload or make_workload()),
            plan=plan or plan_of(),
            sampler=build_sampler(24, asked),
            key=KEY,
            resume=resume,
        ),
        replace(settings(out), options=asked),
        progress=progress,
    )
    return record, model, progress.notes


def test_a_plan_is_trained_as_whole_batches_are(tmp_path: Path) -> None:
    workload = make_workload()
    record, model, notes = trained(tmp_path, workload)
    batches = [
        batch.ids for batch in build_sampler(24, as_options("fit", target_batch=7, steps=4, seed=3)).batches()
    ]
    expected, losses = reference(workload, batches, mean_loss)
    assert apart(weights(model), expected) < 1e-12
    assert (record.first_loss, record.final_loss) == pytest.approx((losses[0], losses[-1]), rel=1e-12)
    assert (record.optimizer_steps, record.resumed_from, notes) == (4, None, [])


def test_a_checkpoint_has_the_facts_that_a_resume_checks(tmp_path: Path) -> None:
    trained(tmp_path, warmup_samples=9, sample_seeds=True)
    facts = load_newest(tmp_path / "checkpoints").facts
    assert msgspec.convert(facts["plan"], Plan) == plan_of()
    assert (facts["key"], facts["seed"], facts["warmup_samples"], facts["sample_seeds"]) == (KEY, 3, 9, True)
    assert (facts["total_steps"], facts["samples"], facts["last_batch"]) == (4, 24, "carry")
    # Without the build that a wheel of PyPI adds at import, such as +cu130.
    assert str(torch.__version__).startswith(facts["versions"]["torch"])


def noisy():
    """Make a workload whose model draws random numbers."""
    return make_workload(model=lambda: nn.Sequential(nn.Dropout(0.5), network()).double())


def test_an_exact_resume_ends_with_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    _, whole, _ = trained(tmp_path / "whole", noisy())
    trained(tmp_path / "parts", noisy(), steps=2)
    checkpoint = load_newest(tmp_path / "parts" / "checkpoints")
    torch.manual_seed(99)
    record, model, _ = trained(
        tmp_path / "parts", noisy(), resume=Resume(checkpoint=checkpoint, is_exact=True)
    )
    assert torch.equal(weights(model), weights(whole))
    assert (record.optimizer_steps, record.resumed_from) == (4, str(checkpoint.path))


def test_a_resume_on_other_hardware_uses_its_own_plan(tmp_path: Path) -> None:
    _, whole, _ = trained(tmp_path / "whole")
    trained(tmp_path / "parts", steps=2)
    resume = Resume(checkpoint=load_newest(tmp_path / "parts" / "checkpoints"), is_exact=False)
    record, model, _ = trained(tmp_path / "parts", plan=plan_of(5), resume=resume)
    assert record.micro_batch == plan_of(5).micro_batch != plan_of().micro_batch
    assert apart(weights(model), weights(whole)) < 1e-12


def test_a_loss_that_cannot_be_split_is_an_error_or_a_note(tmp_path: Path) -> None:
    workload = make_workload(loss=contrastive_loss)
    with pytest.raises(InputError, match="depends on several samples at once"):
        trained(tmp_path, workload)
    assert not (tmp_path / "checkpoints").exists()
    record, _, (note,) = trained(tmp_path, workload, split_check="note")
    assert "depends on several samples at once" in note
    assert record.optimizer_steps == 4
    assert record.notes == [note]


def test_the_knobs_of_the_plan_reach_the_optimizer(tmp_path: Path) -> None:
    seen: list[torch.optim.Optimizer] = []

    def optimizer(params, lr):
        seen.append(torch.optim.SGD(params, lr=lr))
        return seen[-1]

    trained(tmp_path, make_workload(optimizer=optimizer), plan=plan_of(knobs={"optimizer": "foreach"}))
    assert [group["foreach"] for group in seen[-1].param_groups] == [True]
