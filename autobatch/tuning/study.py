"""A study of Optuna, with its default sampler: trials are kept in a storage, and a later search goes on.

Several processes may share a study. A trial whose process was killed stays *running*, and does not count.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.text import error_text

Point: TypeAlias = dict[str, Any]
"""Values of a trial, by name."""
Direction: TypeAlias = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class Study:
    """An open study; every method raises `AutobatchError` if its storage fails."""

    opened: optuna.Study
    space: dict[str, BaseDistribution]
    storage: str | None
    """A database URL, or the path of a journal file; None for memory."""

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.opened.study_name

    def tried(self) -> list[dict[str, Any]]:
        """Return the facts of the trials that have ended, in order, without repeats."""
        first: dict[str, dict[str, Any]] = {}
        for trial in self._ended():
            first.setdefault(str(trial.params), trial.user_attrs)
        return list(first.values())

    def run(
        self,
        objective: Callable[[Point], tuple[float | None, Mapping[str, Any]]],
        first: Callable[[], Iterable[Point]],
        trials: int,
        expired: Callable[[], bool],
    ) -> None:
        """Run trials until so many have ended, or the time is over.

        Args:
            objective: runs a trial; returns its value, None if it is infeasible, and plain facts by name.
            first: returns the points to try before Optuna proposes any; asked before each trial.
            trials: those of earlier runs and of other processes count, too, and points that Optuna repeats.
            expired: asked before each trial.
        """
        while len(ended := self._ended()) < trials and not expired():
            points = first()
            with optuna_errors(self.storage):
                for point in points:
                    if not self.opened.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                        self.opened.enqueue_trial(point, skip_if_exists=True)
                trial = self.opened.ask(self.space)
            known = (
                (earlier.value, earlier.user_attrs) for earlier in ended if earlier.params == trial.params
            )
            try:
                value, facts = next(known, None) or objective(trial.params)
            except BaseException:
                with suppress(Exception):
                    self.opened.tell(trial, state=TrialState.FAIL)
                raise
            with optuna_errors(self.storage):
                for name, fact in facts.items():
                    trial.set_user_attr(name, fact)
                self.opened.tell(trial, value, TrialState.PRUNED if value is None else TrialState.COMPLETE)

    def _ended(self) -> list[FrozenTrial]:
        with optuna_errors(self.storage):
            return self.opened.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def open_study(
    name: str,
    storage: str | None,
    space: Mapping[str, BaseDistribution],
    *,
    direction: Direction,
    metric: str,
    seed: int,
) -> Study:
    """Create a study, or continue the one of this name.

    Args:
        name: of the study.
        storage: see `Study`.
        space: the values of a trial.
        direction: of the optimized value.
        metric: name of the optimized value, which dashboards show.
        seed: of the sampler. Searches that go on, or that share a study, draw other points.

    Raises:
        AutobatchError: the storage fails.
    """
    with optuna_errors(storage):
        study = optuna.create_study(
            study_name=name, storage=_open(storage), direction=direction, load_if_exists=True
        )
        study.set_metric_names([metric])
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    return Study(study, dict(space), storage)


def check_storage(storage: str) -> None:
    """Open a storage, before minutes are spent on results for it.

    Raises:
        InputError: it cannot be opened.
    """
    with optuna_errors(storage, InputError):
        optuna.get_all_study_names(_open(storage) or "")


def _open(storage: str | None) -> BaseStorage | str | None:
    """Return a storage in the form that Optuna takes."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if storage is None or "://" in storage:
        return storage
    # The lock is a symbolic link to the path as given: a relative one would not resolve from another folder.
    path = Path(storage).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


@contextmanager
def optuna_errors(storage: str | None, kind: type[AutobatchError] = AutobatchError) -> Iterator[None]:
    """Turn an error of Optuna within the block into one line, without the password of a storage's URL."""
    try:
        with warnings.catch_warnings():
            # Names of metrics, and journals, are experimental in Optuna.
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Optuna's own text is about other causes
            cause = cause.__cause__
        place = "memory" if storage is None else re.sub(r"(://[^:@/]+):[^@/]+@", r"\1:…@", storage)
        again = "" if kind is InputError else "Repeat the command to go on with its trials, or "
        raise kind(
            f"the study in {place} failed: {type(cause).__name__}: {error_text(cause, first_line=True)}. "
            f"{again}{'g' if again else 'G'}ive another --storage: a database URL or a file"
        ) from error
