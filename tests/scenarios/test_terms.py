"""A loss of several terms from probe to report: what is predicted, what is checked, what is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobatch
from autobatch import InputError, Loss
from autobatch.core.options import Options
from autobatch.estimates.traced_step import record
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, attempt
from autobatch.rehearsal.setup import open_setup
from tests.support.detection import detection, scenes, terms
from tests.support.probes import mlp, work
from tests.support.step_workloads import WORKLOADS, setup, traced_step

RUN: dict[str, Any] = {"target_batch": 24, "trials": 0, "steps": 2, "device": "cpu", "max_micro_batch": 9}


def weighted(model: nn.Module, batch: Any) -> dict[str, Tensor | Loss]:
    """Two terms with counts, one of which a GPU would keep, and a mean."""
    scores = model(batch[0]).flatten(1)
    return {
        "large": Loss(scores[:, :4].square().sum(), torch.tensor(float(len(scores)))),
        "all": Loss(scores.abs().sum(), float(len(scores))),
        "pull": scores.mean(),
    }


def count_rows(batch: Any) -> dict[str, float]:
    return {"large": len(batch[0]), "all": len(batch[0])}


def test_what_is_traced_is_what_an_attempt_allocates() -> None:
    made = setup(replace(WORKLOADS["perceptron"](), loss=weighted, counts=count_rows))
    traced = traced_step(made, steps=ATTEMPT_STEPS)
    assert record(traced, 3).trace == attempt(made, 3).trace.canonical()


def test_the_limit_is_by_brute_force_the_largest() -> None:
    workload = work(lambda: mlp(512), loss=weighted, counts=count_rows)
    asked = {"device": "cpu", "memory_budget": "800KiB"}
    found = autobatch.probe(workload, **asked).probe
    made = open_setup(workload, Options().with_values(**asked))
    assert found.limited_by == "memory"
    assert attempt(made, found.micro_batch).attempt.fits
    assert not attempt(made, found.micro_batch + 1).attempt.fits
    assert len(found.attempts) <= 3


@pytest.mark.program
def test_a_run_tells_each_term_wherever_it_tells_the_loss(tmp_path: Path) -> None:
    held_out = scenes(31)
    workload = detection(validation_data=held_out)
    result = autobatch.fit(workload, **RUN, out=str(tmp_path))
    training = result.training
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert list(row["terms"]) == ["boxes", "classes"]
        assert sum(row["terms"].values()) == pytest.approx(row["loss"], rel=1e-12)
        assert row["accumulation_steps"] == 3
    assert training.final_terms == rows[-1]["terms"]
    assert json.loads((tmp_path / "result.json").read_text())["training"]["final_terms"] == rows[-1]["terms"]
    batch = torch.utils.data.default_collate([held_out[i] for i in range(31)])
    with torch.no_grad():
        own = {name: float(one.total / one.count) for name, one in terms(result.model.eval(), batch).items()}
    own["loss"] = sum(own.values())
    assert training.validation == pytest.approx(own, rel=1e-12)
    assert f"(boxes {training.final_terms['boxes']:.3g}" in (tmp_path / "report.html").read_text()


def test_a_metric_with_the_name_of_a_term_is_refused(tmp_path: Path) -> None:
    workload = detection(validation_data=scenes(9), metrics=lambda m, b: {"boxes": torch.zeros(())})
    with pytest.raises(InputError, match=r"Workload\(metrics=…\) and the loss both have boxes: rename"):
        autobatch.fit(workload, **RUN, out=str(tmp_path))
