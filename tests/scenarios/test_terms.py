"""A loss of several terms from probe to report: what is predicted, what is checked, what is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autobatch
from autobatch import InputError, Loss
from autobatch.core.options import Options
from autobatch.estimates.footprints import footprint
from autobatch.estimates.traced_step import record
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, OTHER_ATTEMPT_STEPS, attempt
from autobatch.rehearsal.setup import open_setup
from autobatch.training.split_check import check_loss_splits
from autobatch.workload.order import GlobalBatchSampler
from tests.support.detection import Batch, detection, scenes, terms, whole
from tests.support.probes import mlp, work
from tests.support.step_workloads import WORKLOADS, setup, traced_step
from tests.support.steps import CLASS_WEIGHTS
from tests.support.training import make_loop, make_setup, reference, weights

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


@pytest.mark.parametrize("order", [ATTEMPT_STEPS, OTHER_ATTEMPT_STEPS])
def test_what_is_traced_is_what_an_attempt_allocates(order: Any) -> None:
    made = setup(replace(WORKLOADS["perceptron"](), loss=weighted, counts=count_rows))
    traced = traced_step(made, steps=order)
    if order == ATTEMPT_STEPS:
        for size in (3, 11, 25):
            assert record(traced, size).trace == attempt(made, size).trace.canonical()
        assert footprint(traced).program.at(23).events == attempt(made, 23).trace.canonical().events
    assert record(traced, 11).trace


@pytest.mark.parametrize(("device", "budget"), [("cpu", "800KiB"), ("sim:t4", "6MiB")])
def test_the_limit_is_by_brute_force_the_largest(device: str, budget: str) -> None:
    workload = work(lambda: mlp(512), loss=weighted, counts=count_rows)
    asked = {"device": device, "memory_budget": budget}
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


def checked(micro_batch: int = 6, **fields: Any) -> list[str]:
    sampler = GlobalBatchSampler(samples=48, target_batch=24, seed=0, steps=1)
    setup_of = make_setup(detection(train_data=scenes(48), **fields))
    return check_loss_splits(setup_of, micro_batch=micro_batch, sampler=sampler)


def bare_classes(model: nn.Module, batch: Batch) -> dict[str, Tensor | Loss]:
    mean = cross_entropy(model(batch[0])[0], batch[1], CLASS_WEIGHTS)
    return {"boxes": terms(model, batch)["boxes"], "classes": mean}


def count_boxes(batch: Batch) -> dict[str, Any]:
    return {"boxes": len(batch[3].nonzero())}


@pytest.mark.parametrize(("loss", "counts"), [(bare_classes, count_boxes), (whole, None)])
def test_a_term_that_cannot_be_split_is_refused(loss: Callable[..., Any], counts: Any) -> None:
    with pytest.raises(InputError, match=r"a sum of several means, .* a Loss by name for each"):
        checked(loss=loss, counts=counts)


def test_a_run_of_any_micro_batch_is_that_of_whole_batches() -> None:
    workload = detection(train_data=scenes(24))
    for micro_batch in (1, 5, 7):
        loop = make_loop(workload, target_batch=7, micro_batch=micro_batch, steps=None, epochs=2)
        records = list(loop.run())
        expected, losses = reference(workload, [one.ids for one in loop.sampler.batches()], whole)
        assert float((weights(loop.train_state.model) - expected).norm() / expected.norm()) <= 1e-12
        assert [one.loss for one in records] == pytest.approx(losses, rel=1e-12)
