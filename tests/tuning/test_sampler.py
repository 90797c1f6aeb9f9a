"""The sampler of trials: its model, its draws, and its fallbacks."""

from __future__ import annotations

from typing import Any

import pytest

from autobatch.core.knobs import defaults
from autobatch.tuning import sampler as samplers
from autobatch.tuning.configuration import MEMORY, infeasible
from tests.support.studies import AXES, make_study, search, speed_of


def test_without_scipy_another_sampler_is_used_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers.importlib.util, "find_spec", lambda name: None)
    found = search(trials=10).tuning
    assert found.sampler == "tree-structured Parzen estimators"
    assert "scipy is not installed" in found.notes[-1]


def test_the_trials_of_a_study_draw_different_points() -> None:
    def first_draws(numbers: list[int]) -> list[dict[str, Any]]:
        study = make_study(AXES)
        drawn = []
        for number in range(max(numbers) + 1):
            asked = study.ask()
            assert asked is not None
            if number in numbers:
                drawn.append(asked.values)
            study.tell(asked, speed_of(asked.values))
        return drawn

    assert first_draws([1, 2]) == first_draws([1, 2])
    one, two = first_draws([1, 2])
    assert one != two


def test_a_large_space_without_a_feasible_point_ends_without_warnings() -> None:
    found = search(lambda _: infeasible(MEMORY, "the GPU is full"), trials=12).tuning
    assert (found.trials, found.best) == (12, defaults(AXES))
    assert found.notes[0].startswith("kept the plan: none of 12 configurations ran")


def test_a_model_that_fails_leaves_its_trials_to_chance_and_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> dict[str, Any]:
        raise ValueError("not positive definite")

    monkeypatch.setattr(samplers.GPSampler, "sample_relative", fail)
    found = search(trials=8).tuning
    assert (found.trials, found.sampler) == (8, "a Gaussian process")
    reason = "(ValueError: not positive definite)"
    assert found.notes == [f"a Gaussian process failed {reason}, so some trials were drawn at random"]


@pytest.mark.parametrize(("trials", "startup"), [(1, 2), (8, 2), (12, 3), (40, 10), (400, 10)])
def test_a_quarter_of_the_trials_is_random_within_bounds(trials: int, startup: int) -> None:
    assert samplers.NumberedSampler(0, trials).startup == startup
