"""A sampler whose choice depends on the seed, the trial's number and the finished trials."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial

STARTUP_SHARE = 4
"""One trial in this many is drawn at random, before a model is fitted."""
MOST_STARTUP = 10
"""Upper bound of the random trials."""


class NumberedSampler(BaseSampler):
    """A sampler that is rebuilt for every trial, with the study's seed plus the trial's number.

    It is a Gaussian process if scipy is installed, because that needs fewer trials, else a tree-structured
    Parzen estimator (TPE).

    Args:
        seed: seed of the study.
        trials: number of planned trials.
        prefer_tpe: use TPE in any case. A learning rate has a cliff, beyond which a Gaussian process finds
            less than TPE does.
    """

    def __init__(self, seed: int, trials: int, *, prefer_tpe: bool = False) -> None:
        self._seed = seed
        self.startup = min(MOST_STARTUP, max(2, trials // STARTUP_SHARE))
        """Trials that are drawn at random before a model is fitted."""
        self._new: type[GPSampler] | type[TPESampler] = (
            GPSampler if importlib.util.find_spec("scipy") and not prefer_tpe else TPESampler
        )
        self._prefers_tpe = prefer_tpe
        self._current: BaseSampler | None = None
        self._failure: str | None = None

    @property
    def kind(self) -> str:
        """Name of the model, for the user."""
        return "a Gaussian process" if self._new is GPSampler else "tree-structured Parzen estimators"

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how trials were chosen, one per line."""
        notes = []
        if self._new is not GPSampler and not self._prefers_tpe:
            notes.append(
                "scipy is not installed, so Optuna's TPE chose the trials. A Gaussian process needs fewer"
            )
        if self._failure is not None:
            notes.append(f"{self.kind} failed ({self._failure}), so some trials were drawn at random")
        return notes

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the space of the model; empty for an enqueued trial. See the base class."""
        seed = (self._seed + trial.number) % 2**32
        self._current = self._new(seed=seed, n_startup_trials=self.startup)
        if "fixed_params" in trial.system_attrs:
            return {}
        return self._current.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Ask the model; if it fails on its data, leave the values to chance. See the base class."""
        assert self._current is not None
        if not search_space:
            return {}
        try:
            with warnings.catch_warnings():
                # If all values are equal, the model divides by zero, warns, and still chooses.
                warnings.simplefilter("ignore", RuntimeWarning)
                return self._current.sample_relative(study, trial, search_space)
        except (ArithmeticError, ValueError, RuntimeError) as error:
            self._failure = f"{type(error).__name__}: {error}"
            return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw one value. See the base class."""
        assert self._current is not None
        return self._current.sample_independent(study, trial, param_name, param_distribution)
