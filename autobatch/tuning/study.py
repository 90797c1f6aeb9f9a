"""A study of Optuna: open its storage, ask it for trials, and store their results.

A study can be continued, and several processes may share one. An infeasible trial is COMPLETE, with the worst
value so far, because samplers learn nothing from failed trials.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.knobs import Configuration, SearchAxis, defaults
from autobatch.core.text import error_text
from autobatch.tuning.configuration import StorageFailed, StudyLocation

GRPC_PORT = 13000
"""Optuna's default port."""
MADE_FOR = "made_for"
"""Attribute of a study: plain values by name that its results depend on."""
_REPEAT = (
    "Look for a process that locks it, a full disk, missing permissions or a deleted file, then repeat the "
    "command to go on with the trials that it has"
)
StoredTrial = optuna.trial.FrozenTrial
"""A trial in the storage: its values are ``params``, and its result is in ``user_attrs``."""
Request = optuna.Trial
"""A trial to run: its values are ``params``."""


class Study:
    """A study in a storage.

    Args:
        place: name, storage and purpose of the study.
        direction: of the optimized value.
        metric: name of that value, which dashboards show.
        suggest: draws the values of a trial.
        sampler: proposes points; made for the number of trials that the study has, so that searches that go
            on, or that share a study, draw other points.
        first: points to try before the sampler proposes any.

    Raises:
        InputError: the storage cannot be opened, or the study was made for something else.
        StorageFailed: the storage fails later, in any method.
    """

    def __init__(
        self,
        place: StudyLocation,
        *,
        direction: Literal["maximize", "minimize"],
        metric: str,
        suggest: Callable[[optuna.Trial], object],
        sampler: Callable[[int], BaseSampler],
        first: Sequence[Configuration],
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name = place.name
        self._storage = place.storage
        self._suggest = suggest
        self._is_maximized = direction == "maximize"
        self.failure: str | None = None
        """Last error of the sampler, after which a point was drawn at random; None if there was none."""
        with _storage_errors(place.storage, opens=True):
            self._study = optuna.create_study(
                study_name=place.name,
                storage=None if place.storage is None else _open(place.storage),
                direction=direction,
                load_if_exists=True,
            )
            known = self.trials()
            self._study.sampler = sampler(len(known))
            _check_purpose(self._study, place)
            self._study.set_metric_names([metric])
            states = (TrialState.WAITING, TrialState.COMPLETE)
            tried = [
                one.params or one.system_attrs.get("fixed_params") for one in known if one.state in states
            ]
            for point in first:
                if point not in tried:
                    self._study.enqueue_trial(dict(point))

    def trials(self, state: Literal["complete", "running", "waiting"] | None = None) -> list[StoredTrial]:
        """Return the trials in a state, in order; None for any. A killed process leaves one running."""
        with _storage_errors(self._storage):
            states = None if state is None else (TrialState[state.upper()],)
            return self._study.get_trials(deepcopy=False, states=states)

    def enqueue(self, values: Configuration) -> None:
        """Let the next trial have these values."""
        with _storage_errors(self._storage):
            self._study.enqueue_trial(dict(values))

    def ask(self) -> Request:
        """Choose a point; draw one at random if the model of the sampler fails on its data."""
        with _storage_errors(self._storage), warnings.catch_warnings():
            # If all values are equal, the Gaussian process divides by zero, warns, and still chooses.
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                return self._draw()
            except (ArithmeticError, ValueError, RuntimeError) as error:
                self.failure = error_text(error, first_line=True)
            sampler, self._study.sampler = self._study.sampler, RandomSampler(len(self.trials()))
            try:
                return self._draw()
            finally:
                self._study.sampler = sampler

    def tell(
        self,
        trial: Request,
        value: float | None,
        attributes: Mapping[str, Any],
        *,
        is_feasible: bool,
        fallback: float = 0.0,
    ) -> None:
        """Store the result of a trial.

        Args:
            trial: the trial.
            value: the optimized value; None if there is none.
            attributes: plain values by name.
            is_feasible: False to count the trial as the worst so far at most, because a value beyond all
                others would flatten the differences between them.
            fallback: the value of an infeasible trial if no other has one.
        """
        with _storage_errors(self._storage):
            for name, one in attributes.items():
                trial.set_user_attr(name, one)
            if not is_feasible:
                worst, best = (min, max) if self._is_maximized else (max, min)
                known = [one.value for one in self.trials("complete") if one.value is not None]
                least = worst(known, default=fallback if value is None else value)
                value = least if value is None else best(least, value)
            self._study.tell(trial, value)

    def fail(self, trial: Request) -> None:
        """Close a trial that will not end, and hide errors of the storage behind the one that ended it."""
        with suppress(Exception):
            self._study.tell(trial, state=TrialState.FAIL)

    def _draw(self) -> Request:
        trial = self._study.ask()
        self._suggest(trial)
        return trial


def study_of_configurations(
    place: StudyLocation, axes: Sequence[SearchAxis], *, seed: int, startup: int
) -> Study:
    """Open a study of speeds: a Gaussian process, after the first points were drawn at random."""
    return Study(
        place,
        direction="maximize",
        metric="samples per second",
        suggest=lambda trial: [trial.suggest_categorical(axis.name, list(axis.choices)) for axis in axes],
        sampler=lambda number: GPSampler(seed=seed + number, n_startup_trials=startup),
        first=[defaults(axes)],
    )


def study_of_rates(
    place: StudyLocation, name: str, default: float, factors: Sequence[float], *, reach: float, seed: int
) -> Study:
    """Open a study of losses: a tree-structured Parzen estimator, as a learning rate has a cliff.

    Args:
        place: name, storage and purpose of the study.
        name: of the value.
        default: the value without tuning.
        factors: first values as multiples of the default.
        reach: values are tried from the default ÷ this to the default × this.
        seed: of the sampler.
    """
    return Study(
        place,
        direction="minimize",
        metric="loss",
        suggest=lambda trial: trial.suggest_float(name, default / reach, default * reach, log=True),
        sampler=lambda number: TPESampler(seed=seed + number),
        first=[{name: default * factor} for factor in factors],
    )


def check_storage(location: str) -> None:
    """Open a storage, before minutes are spent on results for it.

    Raises:
        InputError: it cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with _storage_errors(location, opens=True):
        optuna.get_all_study_names(_open(location))


def _open(location: str) -> BaseStorage | str:
    """Return a storage in a form that Optuna takes; see `StudyLocation.storage`."""
    if location.startswith("grpc://"):
        parts = urlsplit(location)
        return GrpcStorageProxy(host=parts.hostname or "localhost", port=parts.port or GRPC_PORT)
    if "://" in location:
        return location
    # The lock is a symbolic link to the path as given: a relative one would not resolve from another folder.
    path = Path(location).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


@contextmanager
def _storage_errors(location: str | None, *, opens: bool = False) -> Iterator[None]:
    """Turn any error of Optuna or its storage within the block into an `InputError` of one line."""
    kind = InputError if opens else StorageFailed
    remedy = "Give a database URL, grpc://host:port or the path of a journal file" if opens else _REPEAT
    try:
        with warnings.catch_warnings():
            # Some of the interfaces in use are experimental in Optuna.
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    except AutobatchError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Optuna's own text is about other causes
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {error_text(cause, first_line=True)}"
        raise kind(f"the storage {_shown(location)} of the study failed: {reason}. {remedy}") from error


def _shown(location: str | None) -> str:
    """Return the location of a storage without its password."""
    return "memory" if location is None else re.sub(r"(://[^:@/]+):[^@/]+@", r"\1:…@", location)


def _check_purpose(study: optuna.Study, place: StudyLocation) -> None:
    """Check that a study was made for the same things, and note them in a new one."""
    known = study.user_attrs.get(MADE_FOR)
    if known is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(MADE_FOR, dict(place.made_for))
        return
    known = known or {}
    differing = [
        f"{name} is {place.made_for.get(name)!r} here and {known.get(name)!r} there"
        for name in sorted({*place.made_for, *known})
        if place.made_for.get(name) != known.get(name)
    ]
    if differing:
        raise InputError(
            f"the study {place.name!r} in {_shown(place.storage)} was made for something else: "
            f"{', '.join(differing)}. Choose another --study"
        )
