"""An Optuna study that can be resumed and shared: it chooses trials and stores their results.

Several processes may use one study in one storage. A trial belongs to the process that asked for it, and the
trials of ended processes are closed. An infeasible trial is COMPLETE with a violated constraint, because
samplers learn nothing from failed or pruned trials.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Generic, NamedTuple

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import MedianPruner, NopPruner
from optuna.trial import FrozenTrial, TrialState

from autobatch.core.knobs import Value, defaults
from autobatch.tuning.configuration import (
    Key,
    LogRange,
    ResultT,
    StoredResult,
    StudySpec,
    key_of,
    nearest_unseen,
)
from autobatch.tuning.sampler import NumberedSampler
from autobatch.tuning.storage import WORKER, check_purpose, close_orphans, open_storage, storage_errors
from autobatch.tuning.worker import this_worker

REUSED = "reused"
"""Attribute of a repeat: the number of the trial whose result it took over."""


class TrialRequest(NamedTuple, Generic[ResultT]):
    """A point to try."""

    trial: optuna.Trial
    values: dict[str, Value]
    known: ResultT | None = None
    """Its result if it was tried before, because samplers repeat points by design."""


class FinishedTrial(NamedTuple, Generic[ResultT]):
    """A point that was tried."""

    values: dict[str, Value]
    result: ResultT


class OptunaStudy(Generic[ResultT]):
    """A study in a storage: choose the next trial, and keep what the finished ones found.

    Args:
        spec: what to search, and how to store results.
        name: name of the study in its storage.
        storage: a database URL, ``grpc://host:port``, or the path of a journal file; None for memory.
        made_for: plain values by name that the results depend on.
        seed: the same seed and the same results give the same points.
        trials: number of planned trials; a space of at most that size is tried completely.

    Raises:
        InputError: the storage cannot be opened or is locked, or the study was made for something else.
    """

    def __init__(
        self,
        spec: StudySpec[ResultT],
        *,
        name: str,
        storage: str | None,
        made_for: Mapping[str, Any],
        seed: int,
        trials: int,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._spec = spec
        self._storage = storage
        self._seed = seed
        self._is_small = spec.size <= trials
        self._sampler = NumberedSampler(seed, trials, prefer_tpe=isinstance(spec.space, LogRange))
        self._me = this_worker()
        with storage_errors(storage, "opened"):
            self._study = optuna.create_study(
                study_name=name,
                storage=open_storage(storage),
                direction=spec.direction,
                load_if_exists=True,
                sampler=self._sampler,
                pruner=NopPruner() if spec.early_stop is None else MedianPruner(*spec.early_stop),
            )
            check_purpose(self._study, made_for, storage)
            self._study.set_metric_names([spec.metric])
            close_orphans(self._study, self._me)
            known = self._by_key(TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE)
            for point in spec.first_points:
                if key_of(point) not in known:
                    self._study.enqueue_trial(dict(point), user_attrs={"why": "first"})

    @property
    def name(self) -> str:
        """Name of the study."""
        return self._study.study_name

    @property
    def sampler(self) -> str:
        """Description of how trials are chosen, for the user."""
        return "every configuration" if self._is_small else self._sampler.kind

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how trials were chosen, one per line."""
        return [] if self._is_small else self._sampler.notes

    def num_taken(self) -> int:
        """Return the number of points that are finished, or running in a live process."""
        with storage_errors(self._storage, "read"):
            close_orphans(self._study, self._me)
            return len(self._tried(TrialState.RUNNING, TrialState.COMPLETE))

    def ask(self) -> TrialRequest[ResultT] | None:
        """Choose a point that no other process is trying. Return None if every point is taken.

        Raises:
            InputError: the storage failed.
        """
        with storage_errors(self._storage, "used"):
            while True:
                done = self._by_key(TrialState.COMPLETE)
                taken = self._by_key(TrialState.RUNNING, TrialState.COMPLETE)
                if len(taken) >= self._spec.size:
                    return None
                if self._needs_no_model(len(done)) and not self._trials(TrialState.WAITING):
                    self._enqueue_unseen(taken)
                trial = self._study.ask()
                trial.set_user_attr(WORKER, list(self._me))
                values = self._suggest(trial)
                if key_of(values) not in taken:
                    return TrialRequest(trial, values)
                self._enqueue_unseen(taken)
                known = done.get(key_of(values))
                if known is not None:
                    trial.set_user_attr(REUSED, known.number)
                    return TrialRequest(trial, values, self._decode(known))
                # Another process is running it.
                self._study.tell(trial, state=TrialState.FAIL)

    def should_stop(self, request: TrialRequest[ResultT], step: int, value: float) -> bool:
        """Store an intermediate value, and return whether the spec's `MedianStop` ends the trial.

        Raises:
            InputError: the storage failed.
        """
        with storage_errors(self._storage, "written"):
            request.trial.report(value, step)
            return request.trial.should_prune()

    def tell(self, request: TrialRequest[ResultT], result: ResultT) -> None:
        """Store the result of a trial.

        Raises:
            InputError: the storage failed.
        """
        with storage_errors(self._storage, "written"), suppress(UpdateFinishedTrialError):
            stored = self._spec.encode(result)
            for name, value in stored.attributes.items():
                request.trial.set_user_attr(name, value)
            request.trial.set_constraint(*stored.constraint)
            self._study.tell(request.trial, self._value_of(stored))

    def abandon(self, request: TrialRequest[ResultT]) -> None:
        """Close a trial that will not end, and hide errors of the storage behind the one that ended it."""
        with suppress(Exception):
            self._study.tell(request.trial, state=TrialState.FAIL)

    def finished(self) -> list[FinishedTrial[ResultT]]:
        """Return the finished trials in order, with each point of a finite space once.

        Raises:
            InputError: the storage failed.
        """
        with storage_errors(self._storage, "read"):
            return [
                FinishedTrial(dict(trial.params), self._decode(trial))
                for trial in self._tried(TrialState.COMPLETE)
            ]

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states that have a value for every name, in order."""
        trials = self._study.get_trials(deepcopy=False, states=states)
        return [trial for trial in trials if set(_values_of(trial)) == self._spec.names]

    def _by_key(self, *states: TrialState) -> dict[Key, FrozenTrial]:
        """Return the first trial of each point."""
        found: dict[Key, FrozenTrial] = {}
        for trial in self._trials(*states):
            found.setdefault(key_of(_values_of(trial)), trial)
        return found

    def _tried(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states; of a finite space, the first of each point."""
        return list(self._by_key(*states).values()) if self._spec.axes else self._trials(*states)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Value]:
        if isinstance(self._spec.space, LogRange):
            name, low, high = self._spec.space
            return {name: trial.suggest_float(name, low, high, log=True)}
        axes = self._spec.axes
        return {axis.name: trial.suggest_categorical(axis.name, list(axis.choices)) for axis in axes}

    def _decode(self, trial: FrozenTrial) -> ResultT:
        return self._spec.decode(trial.params, trial.user_attrs)

    def _value_of(self, stored: StoredResult) -> float:
        """Return the value of a result; an infeasible one is at best the worst so far.

        A figure beyond all bounds would flatten the differences between all others.
        """
        if stored.constraint[1] <= 0 and stored.value is not None:
            return stored.value
        better, worse = (max, min) if self._spec.direction == "maximize" else (min, max)
        values = [trial.value for trial in self._trials(TrialState.COMPLETE) if trial.value is not None]
        worst = worse(values, default=stored.fallback)
        return worst if stored.value is None else better(worst, stored.value)

    def _needs_no_model(self, done: int) -> bool:
        """Return whether the next point is drawn among the untried ones, rather than by the model.

        In a finite space, every second one is: the neighbours of the best find as much as the model does, and
        cost nothing to choose.
        """
        if not self._spec.axes:
            return False
        return self._is_small or (done > self._sampler.startup and done % 2 == 1)

    def _enqueue_unseen(self, taken: Mapping[Key, object]) -> None:
        """Enqueue the untried point of a finite space that is nearest to the best, or one of several."""
        if not self._spec.axes:
            return
        feasible = [
            trial
            for trial in self._trials(TrialState.COMPLETE)
            if all(figure <= 0 for figure in trial.constraints.values())
        ]
        better = max if self._spec.direction == "maximize" else min
        best = better(feasible, key=lambda trial: trial.value or 0.0, default=None)
        values = nearest_unseen(
            self._spec.axes,
            {*taken, *self._by_key(TrialState.WAITING)},
            defaults(self._spec.axes) if best is None else best.params,
            random.Random(f"{self._seed} {len(self._study.get_trials(deepcopy=False))}"),
        )
        if values is not None:
            self._study.enqueue_trial(dict(values), user_attrs={"why": "not tried before"})


def _values_of(trial: FrozenTrial) -> dict[str, Any]:
    """Return the values of a trial; for one that waits, those it was enqueued with."""
    return trial.params or trial.system_attrs.get("fixed_params", {})
