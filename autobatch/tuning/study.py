"""A study in Optuna's hands: what was tried, and what to try next.

    WAITING ──► RUNNING ──► COMPLETE    feasible or not; samplers learn nothing from what is failed or pruned
                   └──────► FAIL        its process ended, or was stopped

Several workers may share a study. What a trial draws depends on the seed and its number alone, so that no two
draw the same, and a study that goes on does not draw again what it drew before.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from autobatch.knobs import Axis, Value, defaults
from autobatch.tuning.keeping import WORKER, Kept, values_of
from autobatch.tuning.measurement import CONSTRAINTS, Measurement
from autobatch.tuning.sampler import NumberedSampler
from autobatch.tuning.space import Key, key_of, nearest_unseen, size_of


class Asked(NamedTuple):
    """A configuration to try."""

    trial: optuna.Trial
    values: dict[str, Value]


class Finished(NamedTuple):
    """A configuration that was tried."""

    values: dict[str, Value]
    found: Measurement


class Study:
    """Configurations that were tried, and the next one.

    Args:
        axes: what can be chosen.
        name: of the study in its storage.
        storage: a database URL, ``grpc://host:port``, or the path of a journal file; ``None``: in memory.
        made_for: what its figures depend on; plain values by name.
        seed: same seed, same figures, same questions.
        trials: how many are planned; a space that is no larger is tried whole.

    Raises:
        InputError: the storage cannot be opened or is locked, or the study was made for something else.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        *,
        name: str,
        storage: str | None,
        made_for: Mapping[str, Any],
        seed: int,
        trials: int,
    ) -> None:
        self._axes = list(axes)
        self._seed = seed
        self._is_small = size_of(self._axes) <= trials
        self._sampler = NumberedSampler(seed, trials)
        self._kept = Kept(
            name,
            storage,
            made_for={**made_for, **{axis.name: list(axis.choices) for axis in self._axes}},
            direction="maximize",
            sampler=self._sampler,
        )
        self._study = self._kept.study
        with self._kept.guarded("opened"):
            base = defaults(self._axes)
            if key_of(base) not in self._occupied(
                TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE
            ):
                self._study.enqueue_trial(dict(base), user_attrs={"why": "default"})

    @property
    def name(self) -> str:
        """Its name."""
        return self._study.study_name

    @property
    def sampler(self) -> str:
        """Who asks the questions, for people."""
        return "every configuration" if self._is_small else self._sampler.kind

    @property
    def notes(self) -> list[str]:
        """What a person should know of how trials were chosen, a line each."""
        return [] if self._is_small else self._sampler.notes

    def taken(self) -> int:
        """Configurations that were tried, or are being tried by a process that lives."""
        with self._kept.guarded("read"):
            self._kept.close_orphans()
            return len(self._occupied(TrialState.RUNNING, TrialState.COMPLETE))

    def ask(self) -> Asked | None:
        """A configuration that nobody has tried; ``None`` where none is left.

        Raises:
            InputError: the storage is gone.
        """
        with self._kept.guarded("used"):
            while True:
                done = self._occupied(TrialState.COMPLETE)
                taken = self._occupied(TrialState.RUNNING, TrialState.COMPLETE)
                if len(taken) >= size_of(self._axes):
                    return None
                if self._needs_no_model(len(done)) and not self._kept.of(TrialState.WAITING):
                    self._enqueue_unseen(taken)
                trial = self._kept.ask()
                values: dict[str, Value] = {
                    axis.name: trial.suggest_categorical(axis.name, list(axis.choices)) for axis in self._axes
                }
                if key_of(values) not in taken:
                    return Asked(trial, values)
                # Samplers repeat points by design; a repeat costs nothing.
                self._close_repeat(trial, done.get(key_of(values)))
                self._enqueue_unseen(taken)

    def tell(self, asked: Asked, found: Measurement) -> None:
        """Keep what a trial found: the logarithm of its speed, and the worst so far where there is none.

        Raises:
            InputError: the storage is gone.
        """
        with self._kept.guarded("written"), suppress(UpdateFinishedTrialError):
            constraints = dict.fromkeys(CONSTRAINTS, -1.0) | dict(found.constraints)
            for name, value in found._replace(constraints=constraints)._asdict().items():
                asked.trial.set_user_attr(name, value)
            # Each constraint is one more process to fit in every trial to come: the tightest says it all.
            tightest = max(constraints, key=lambda name: constraints[name])
            asked.trial.set_constraint(tightest, constraints[tightest])
            values = [one.value for one in self._kept.of(TrialState.COMPLETE) if one.value is not None]
            speed = math.log(found.samples_per_s) if found.feasible else min(values, default=0.0)
            self._study.tell(asked.trial, speed)

    def abandon(self, asked: Asked) -> None:
        """Close a trial that is not going to end; whatever fails here is not worth another error."""
        self._kept.abandon(asked.trial)

    def finished(self) -> list[Finished]:
        """Every configuration that was tried, in order, each once.

        Raises:
            InputError: the storage is gone.
        """
        with self._kept.guarded("read"):
            return [
                Finished(dict(trial.params), _measurement(trial))
                for trial in self._occupied(TrialState.COMPLETE).values()
            ]

    def importance(self) -> dict[str, float]:
        """How much each knob mattered (PED-ANOVA, Watanabe et al. 2023, arXiv:2304.10255)."""
        with warnings.catch_warnings(), suppress(RuntimeError, ValueError, UserWarning):
            # Too few trials, or all of them equal: then nothing is known.
            warnings.simplefilter("error", UserWarning)
            return dict(optuna.importance.get_param_importances(self._study))
        return {}

    def _needs_no_model(self, done: int) -> bool:
        """Whether the next trial is drawn from what is left: of a small space always, else every second.

        Neighbours of the best find as much as the model does, for nothing; that halves what choosing costs.
        """
        return self._is_small or (done > self._sampler.startup and done % 2 == 1)

    def _occupied(self, *states: TrialState) -> dict[Key, FrozenTrial]:
        """Trials by their configuration, the first of each."""
        found: dict[Key, FrozenTrial] = {}
        for trial in self._kept.of(*states):
            values = values_of(trial)
            if len(values) == len(self._axes):
                found.setdefault(key_of(values), trial)
        return found

    def _enqueue_unseen(self, taken: Mapping[Key, object]) -> None:
        """Put a configuration that nobody tries in line: near the best, of those at random."""
        done = [one for one in self._kept.of(TrialState.COMPLETE) if one.user_attrs.get("failure") is None]
        best = max(done, key=lambda one: one.value or -math.inf, default=None)
        values = nearest_unseen(
            self._axes,
            {*taken, *self._occupied(TrialState.WAITING)},
            defaults(self._axes) if best is None else best.params,
            random.Random(f"{self._seed} {len(self._study.get_trials(deepcopy=False))}"),
        )
        if values is not None:
            self._study.enqueue_trial(dict(values), user_attrs={"why": "not tried before"})

    def _close_repeat(self, trial: optuna.Trial, known: FrozenTrial | None) -> None:
        if known is None:  # another worker is at it
            self._study.tell(trial, state=TrialState.FAIL)
            return
        for name, value in known.user_attrs.items():
            if name != WORKER:
                trial.set_user_attr(name, value)
        trial.set_user_attr("reused", known.number)
        for name, value in known.constraints.items():
            trial.set_constraint(name, value)
        self._study.tell(trial, known.value)


def _measurement(trial: FrozenTrial) -> Measurement:
    stored = {name: trial.user_attrs[name] for name in Measurement._fields if name in trial.user_attrs}
    return Measurement(0.0, failure="nothing is known of it")._replace(**stored)
