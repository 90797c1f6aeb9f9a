"""Search spaces, exact measurements, and studies in a journal file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna

from autobatch.core.knobs import SearchAxis
from autobatch.tuning.configuration import Budget, Measurement, StudyLocation
from autobatch.tuning.find_fastest import TuningResult, find_fastest

AXES = [
    SearchAxis("micro_batch_shift", (0, 1, 2, 3)),
    SearchAxis("precision", ("fp32", "bf16")),
    SearchAxis("checkpointing", ("none", "full")),
    SearchAxis("optimizer", ("default", "foreach", "fused")),
]


SMALL_AXES = AXES[:2]


def all_points(axes: list[SearchAxis]) -> list[dict[str, Any]]:
    """Return every configuration of some axes."""
    names = [axis.name for axis in axes]
    return [dict(zip(names, one, strict=True)) for one in itertools.product(*(axis.choices for axis in axes))]


def speed_of(values: Any) -> float:
    """Return samples per second: bf16 and half the micro-batch are faster, most else is slower."""
    shift = [1.0, 1.1, 0.9, 0.7][int(values["micro_batch_shift"] or 0)]
    precision = 1.5 if values["precision"] == "bf16" else 1.0
    checkpointing = 0.7 if values.get("checkpointing") == "full" else 1.0
    optimizer = {"default": 1.0, "foreach": 1.02, "fused": 1.06}[str(values.get("optimizer", "default"))]
    return 1000 * shift * precision * checkpointing * optimizer


def exact(values: Any) -> Measurement:
    return Measurement(speed_of(values), 64 >> int(values["micro_batch_shift"] or 0))


class CountingMeasure:
    """A measurement that keeps the configurations it was asked for."""

    def __init__(self, measure: Callable[[Any], Measurement] = exact) -> None:
        self.measure = measure
        self.asked: list[dict[str, Any]] = []

    def __call__(self, values: Any) -> Measurement:
        self.asked.append(dict(values))
        return self.measure(values)


def search(
    measure: Callable[[Any], Measurement] = exact,
    axes: list[SearchAxis] = AXES,
    *,
    trials: int = 12,
    seed: int = 0,
    storage: str | None = None,
    made_for: Mapping[str, Any] = {"target_batch": 64},
    confirm: Any = lambda _: Measurement(0.0, 8),
    expired: Callable[[], bool] = lambda: False,
    **more: Any,
) -> TuningResult:
    return find_fastest(
        measure,
        confirm,
        axes,
        budget=Budget(trials, expired),
        seed=seed,
        place=StudyLocation("study", storage, made_for),
        **more,
    )


def open_journal(path: Path) -> optuna.Study:
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    return optuna.load_study(study_name="study", storage=optuna.storages.JournalStorage(backend))
