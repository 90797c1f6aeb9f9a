"""A study in its storage: made for one purpose, freed of what dead processes left, failures in one line."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autobatch.errors import AutobatchError, InputError
from autobatch.tuning.storage import describe_storage, open_storage, reason_of
from autobatch.tuning.worker import Worker, is_gone, this_worker

MADE_FOR = "made_for"
WORKER = "worker"
ORPHAN_SECONDS = 60.0
"""A trial that runs this long without a word of whose it is has lost its process in its first moment."""


@contextmanager
def guarded(storage: str | None, what: str) -> Iterator[None]:
    """Inside, whatever a storage raises becomes one line.

    Args:
        storage: see `Kept`.
        what: what is done to it: ``opened``, ``read``, ``used`` or ``written``.

    Raises:
        InputError: the storage is gone, or refuses.
    """
    try:
        with warnings.catch_warnings():
            # Of interfaces that Optuna calls experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except AutobatchError:
        raise
    except Exception as error:
        reason = reason_of(error)
        advice = "give a database URL, grpc://host:port or the path of a journal file"
        if "locked" in reason:
            advice = "another process holds it: wait for its end, or give another storage"
        raise InputError(
            f"the storage {describe_storage(storage)} of the study cannot be {what}: {reason}; {advice}"
        ) from error


def check_storage(storage: str | None) -> None:
    """See that a storage can be opened, before minutes are spent on what is to be kept there.

    Raises:
        InputError: it cannot be opened, or does not answer.
    """
    if storage is None:
        return
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with guarded(storage, "opened"):
        opened = optuna.storages.get_storage(open_storage(storage))
        opened.get_all_studies()
        opened.remove_session()


class Kept:
    """A study and where it is kept.

    Args:
        name: of the study in its storage.
        storage: a database URL, ``grpc://host:port``, or the path of a journal file; ``None``: in memory.
        made_for: what its figures depend on; plain values by name.
        direction: ``maximize`` or ``minimize``.
        sampler: draws the trials.
        pruner: says which trials are not worth their end; ``None``: none is stopped.

    Raises:
        InputError: the storage cannot be opened or is locked, or the study was made for something else.
    """

    def __init__(
        self,
        name: str,
        storage: str | None,
        *,
        made_for: Mapping[str, Any],
        direction: Literal["maximize", "minimize"],
        sampler: BaseSampler,
        pruner: BasePruner | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._storage = storage
        self._me = this_worker()
        with self.guarded("opened"):
            self.study = optuna.create_study(
                study_name=name,
                storage=open_storage(storage),
                direction=direction,
                load_if_exists=True,
                sampler=sampler,
                pruner=pruner or optuna.pruners.NopPruner(),
            )
            self._check_purpose(dict(made_for))
            self.close_orphans()

    def of(self, *states: TrialState) -> list[FrozenTrial]:
        """Trials in these states, in order."""
        return self.study.get_trials(deepcopy=False, states=states)

    def ask(self) -> optuna.Trial:
        """A trial that is known to be this process's."""
        trial = self.study.ask()
        trial.set_user_attr(WORKER, list(self._me))
        return trial

    def abandon(self, trial: optuna.Trial) -> None:
        """Close a trial that is not going to end; whatever fails here is not worth another error."""
        with suppress(Exception):
            self.study.tell(trial, state=TrialState.FAIL)

    def close_orphans(self) -> None:
        """Close the trials of processes that have ended."""
        now = datetime.datetime.now(tz=datetime.UTC)
        for trial in self.of(TrialState.RUNNING):
            owner = trial.user_attrs.get(WORKER)
            if owner is not None:
                gone = is_gone(Worker(*owner), self._me)
            else:
                begun = trial.datetime_start or now
                gone = (now - begun.astimezone(datetime.UTC)).total_seconds() > ORPHAN_SECONDS
            if gone:
                with suppress(UpdateFinishedTrialError):
                    self.study.tell(trial.number, state=TrialState.FAIL)

    def guarded(self, what: str) -> AbstractContextManager[None]:
        """See `guarded`."""
        return guarded(self._storage, what)

    def _check_purpose(self, made_for: dict[str, Any]) -> None:
        known = self.study.user_attrs.get(MADE_FOR)
        if known is None and not self.study.get_trials(deepcopy=False):
            self.study.set_user_attr(MADE_FOR, made_for)
            return
        known = known or {}
        differing = [
            f"{name} is {_shown(made_for, name)} here and {_shown(known, name)} there"
            for name in sorted({*made_for, *known})
            if made_for.get(name) != known.get(name)
        ]
        if differing:
            raise InputError(
                f"the study {self.study.study_name!r} in {describe_storage(self._storage)} was made for "
                f"something else: {'; '.join(differing)}: choose another --study"
            )


def values_of(trial: FrozenTrial) -> dict[str, Any]:
    """What a trial tries; of one that waits, what it was put in line with."""
    return trial.params or trial.system_attrs.get("fixed_params", {})


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "missing"
