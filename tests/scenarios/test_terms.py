"""A loss of several terms from probe to report: what is predicted, what is checked, what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.detection import detection, scenes, terms
from tests.support.runs import fit, rows

RUN: dict[str, Any] = {"target_batch": 24, "steps": 2, "max_micro_batch": 9}


def test_a_run_tells_each_term_wherever_it_tells_the_loss(tmp_path: Path) -> None:
    held_out = scenes(31)
    workload = detection(validation_data=held_out)
    result, _ = fit(workload, tmp_path, **RUN)
    training, steps = result.training, rows(tmp_path)
    for row in steps:
        assert list(row["terms"]) == ["boxes", "classes"]
        assert sum(row["terms"].values()) == pytest.approx(row["loss"], rel=1e-12)
        assert row["accumulation_steps"] == 3
    assert training.final_terms == steps[-1]["terms"]
    assert json.loads((tmp_path / "result.json").read_text())["training"]["final_terms"] == steps[-1]["terms"]
    batch = torch.utils.data.default_collate([held_out[i] for i in range(31)])
    with torch.no_grad():
        own = {name: float(one.total / one.count) for name, one in terms(result.model.eval(), batch).items()}
    own["loss"] = sum(own.values())
    assert training.validation == pytest.approx(own, rel=1e-12)
    assert f"(boxes {training.final_terms['boxes']:.3g}" in (tmp_path / "report.html").read_text()
