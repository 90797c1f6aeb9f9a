"""What draws the next configuration, from the seed and the number of the trial alone."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial

STARTUP_SHARE = 4


MOST_STARTUP = 10
"""Trials drawn at random before a model is fitted: one of so many, and at most so many."""


class NumberedSampler(BaseSampler):
    """A sampler made anew for every trial, with a seed that the trial's number moves on.

    A Gaussian process where scipy is there, which finds more in few trials; else a tree of Parzen estimators.

    Args:
        seed: of the study.
        trials: how many are planned.
        parzen: rather the estimators: beyond a cliff, which a learning rate has, a Gaussian process finds
            less than they do.
    """

    def __init__(self, seed: int, trials: int, *, parzen: bool = False) -> None:
        self._seed = seed
        self.startup = min(MOST_STARTUP, max(2, trials // STARTUP_SHARE))
        """Trials that are drawn at random before a model is fitted."""
        self._new: type[GPSampler] | type[TPESampler] = (
            GPSampler if importlib.util.find_spec("scipy") and not parzen else TPESampler
        )
        self._is_choice = parzen
        self._current: BaseSampler | None = None
        self._trouble: str | None = None

    @property
    def kind(self) -> str:
        """Its name, for people."""
        return "a Gaussian process" if self._new is GPSampler else "tree-structured Parzen estimators"

    @property
    def notes(self) -> list[str]:
        """What a person should know of it, a line each."""
        notes = []
        if self._new is not GPSampler and not self._is_choice:
            notes.append(
                "scipy is not there, so Optuna's TPE chose the trials: a Gaussian process needs fewer"
            )
        if self._trouble is not None:
            notes.append(f"{self.kind} could not choose every trial ({self._trouble}): others are random")
        return notes

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """See the base class; what was put in line needs no model."""
        seed = (self._seed + trial.number) % 2**32
        self._current = self._new(seed=seed, n_startup_trials=self.startup)
        if "fixed_params" in trial.system_attrs:
            return {}
        return self._current.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See the base class; where the model fails on its figures, they are left to chance."""
        assert self._current is not None
        if not search_space:
            return {}
        try:
            with warnings.catch_warnings():
                # Where all figures are alike, it divides by nothing, and chooses all the same.
                warnings.simplefilter("ignore", RuntimeWarning)
                return self._current.sample_relative(study, trial, search_space)
        except (ArithmeticError, ValueError, RuntimeError) as error:
            self._trouble = f"{type(error).__name__}: {error}"
            return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """See the base class."""
        assert self._current is not None
        return self._current.sample_independent(study, trial, param_name, param_distribution)
