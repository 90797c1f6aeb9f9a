"""A study of Optuna, with its default sampler: trials are kept in a file, and a later search goes on.

Several processes may share a study. A trial whose process was killed stays *running*, and does not count.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autobatch.core.errors import AutobatchError
from autobatch.core.options import Options
from autobatch.core.records import LrTrial, Trial
from autobatch.core.text import error_text
from autobatch.rehearsal.setup import SetupInfo

Facts = TypeVar("Facts", Trial, LrTrial)
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
FACTS = "facts"
"""Name of the attribute of a trial that keeps its record."""
NOT_A_PURPOSE = ("budget_bytes", "size of its memory")
"""Fields of the key that do not belong to a study, because free memory makes no configuration fast."""


def open_study(
    info: SetupInfo, options: Options, home: Path, direction: Literal["maximize", "minimize"], *purpose: Any
) -> optuna.Study:
    """Create the study of a setup and a purpose, or continue it; everything that results depend on names it.

    It is kept in the data directory, and in memory if that is not writable.
    """
    key = {name: value for name, value in info.key.items() if name not in NOT_A_PURPOSE}
    asked = [options.target_batch, options.memory_budget, options.max_micro_batch]
    content = msgspec.json.encode([key, asked, purpose], order="deterministic")
    name, folder = f"{info.name}-{hashlib.sha256(content).hexdigest()[:12]}", home / "studies"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    with optuna_errors():
        if os.access(folder, os.W_OK | os.X_OK):
            # The lock is a symbolic link to the path as given, which must resolve from any folder.
            storage = JournalStorage(JournalFileBackend(str(folder.absolute() / f"{name}.log")))
        study = optuna.create_study(
            study_name=name, storage=storage, direction=direction, load_if_exists=True
        )
        # Searches that go on, or that share a study, draw other points.
        study.sampler = optuna.samplers.TPESampler(seed=options.seed + len(study.trials))
    return study


def run_trials(
    study: optuna.Study,
    objective: Callable[[int, Any], tuple[float | None, Facts]],
    *,
    space: Mapping[str, BaseDistribution],
    first: Callable[[], Iterable[dict[str, Any]]],
    trials: int,
    deadline: float,
) -> None:
    """Run trials until so many have ended, with those of earlier runs and of other processes.

    The objective takes a number and values, and returns what to optimize, None if infeasible, and a record.
    ``first`` is asked before each trial for the values to try before Optuna proposes any. No trial starts
    after the deadline, a monotonic time.

    Raises:
        AutobatchError: the file of the study fails.
        BaseException: whatever the objective raises.
    """
    while time.monotonic() < deadline:
        points = first()
        with optuna_errors():
            ended = len(study.get_trials(deepcopy=False, states=ENDED))
            if ended >= trials:
                return
            for point in points:
                if not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                    study.enqueue_trial(point, skip_if_exists=True)
            trial = study.ask(dict(space))
        try:
            value, facts = objective(ended, trial.params)
        except BaseException:
            with suppress(Exception):
                study.tell(trial, state=TrialState.FAIL)
            raise
        with optuna_errors():
            trial.set_user_attr(FACTS, msgspec.to_builtins(facts))
            study.tell(trial, value, TrialState.PRUNED if value is None else TrialState.COMPLETE)


def tried(study: optuna.Study, kind: type[Facts]) -> list[Facts]:
    """Return the records of the trials that have ended, in order."""
    with optuna_errors():
        ended = study.get_trials(deepcopy=False, states=ENDED)
        return [msgspec.convert(trial.user_attrs[FACTS], kind) for trial in ended]


@contextmanager
def optuna_errors() -> Iterator[None]:
    """Turn an error of Optuna within the block into one line."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Optuna's own text is about other causes
            cause = cause.__cause__
        raise AutobatchError(
            "the study of the tuner in the data directory failed: "
            f"{type(cause).__name__}: {error_text(cause, first_line=True)}. Repeat the command to go on with "
            "its trials, or add --trials 0"
        ) from error
