"""A study of one learning rate in Optuna's hands, on a logarithmic scale around the default.

A trial that diverges, or that the pruner ends, is COMPLETE and infeasible: samplers learn nothing from what
is failed or pruned, and what is infeasible is never the best.
"""

from __future__ import annotations

import datetime
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, NamedTuple

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner, MedianPruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.knobs import SearchAxis, Value, defaults
from autobatch.tuning.configuration import CONSTRAINTS, Key, Measurement, key_of, nearest_unseen, size_of
from autobatch.tuning.lr_trial import PARTS, REACH, LrTrialResult
from autobatch.tuning.sampler import NumberedSampler
from autobatch.tuning.storage import Worker, describe_storage, is_gone, open_storage, reason_of, this_worker

MADE_FOR = "made_for"


WORKER = "worker"


ORPHAN_SECONDS = 60.0
"""A trial that runs this long without a word of whose it is has lost its process in its first moment."""


@contextmanager
def guarded(storage: str | None, what: str) -> Iterator[None]:
    """Inside, whatever a storage raises becomes one line.

    Args:
        storage: see `OptunaStudy`.
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


class OptunaStudy:
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


RATE = "learning_rate"


FIRST_LOOK = (1.0, 4.0, 1 / 4, 16.0, 1 / 16)
"""The first trials, in shares of the default: the whole range, before a model has its say."""


TRAINS = "does_not_train"
"""Constraint: it diverged, was ended, or raised an error."""


STARTUP = 4
"""Trials that are run to their end before any is ended early."""


WARM_PARTS = PARTS // 2
"""Parts of a run before which none is ended: a small learning rate is slow at first."""


class LrTrialRequest(NamedTuple):
    """A learning rate to try."""

    trial: optuna.Trial
    rate: float
    known: LrTrialResult | None
    """What it came to, where it was tried before: samplers repeat points by design."""


class LrStudy:
    """Learning rates that were tried, and the next one.

    Args:
        default: the learning rate of the plan; the first trial.
        name: of the study in its storage.
        storage: a database URL, ``grpc://host:port``, or the path of a journal file; ``None``: in memory.
        made_for: what its figures depend on; plain values by name.
        seed: same seed, same figures, same questions.
        trials: how many are planned.

    Raises:
        InputError: the storage cannot be opened or is locked, or the study was made for something else.
    """

    def __init__(
        self,
        default: float,
        *,
        name: str,
        storage: str | None,
        made_for: Mapping[str, Any],
        seed: int,
        trials: int,
    ) -> None:
        self._default = default
        self._sampler = NumberedSampler(seed, trials, parzen=True)
        pruner = MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=WARM_PARTS)
        self._kept = OptunaStudy(
            name, storage, made_for=made_for, direction="minimize", sampler=self._sampler, pruner=pruner
        )
        with self._kept.guarded("opened"):
            open_or_done = self._kept.of(TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE)
            known = [values_of(one) for one in open_or_done]
            for factor in FIRST_LOOK:
                if {RATE: default * factor} not in known:
                    self._kept.study.enqueue_trial({RATE: default * factor})

    @property
    def name(self) -> str:
        """Its name."""
        return self._kept.study.study_name

    @property
    def sampler(self) -> str:
        """Who asks the questions, for people."""
        return self._sampler.kind

    @property
    def notes(self) -> list[str]:
        """What a person should know of how trials were chosen, a line each."""
        return self._sampler.notes

    def taken(self) -> int:
        """Learning rates that were tried, or are being tried by a process that lives."""
        with self._kept.guarded("read"):
            self._kept.close_orphans()
            return len(self._kept.of(TrialState.RUNNING, TrialState.COMPLETE))

    def ask(self) -> LrTrialRequest:
        """A learning rate to try; the first is the default."""
        with self._kept.guarded("used"):
            trial = self._kept.ask()
            low, high = self._default / REACH, self._default * REACH
            rate = trial.suggest_float(RATE, low, high, log=True)
            return LrTrialRequest(
                trial, rate, next((one for one in self.finished() if one.rate == rate), None)
            )

    def is_hopeless(self, asked: LrTrialRequest, part: int, loss: float) -> bool:
        """Keep the loss of a part; whether it is worse than the median of the trials before (Optuna's
        ``MedianPruner``). The default always runs to its end: all others are held against it.
        """
        with self._kept.guarded("written"):
            asked.trial.report(loss, part)
            return asked.rate != self._default and asked.trial.should_prune()

    def tell(self, asked: LrTrialRequest, tried: LrTrialResult) -> None:
        """Keep what a trial came to: its loss, and no more than the worst so far where it is infeasible."""
        with self._kept.guarded("written"), suppress(UpdateFinishedTrialError):
            for name in ("loss", "first", "failure"):
                asked.trial.set_user_attr(name, getattr(tried, name))
            asked.trial.set_constraint(TRAINS, -1.0 if tried.failure is None else 1.0)
            self._kept.study.tell(asked.trial, self._value(tried))

    def abandon(self, asked: LrTrialRequest) -> None:
        """Close a trial that is not going to end."""
        self._kept.abandon(asked.trial)

    def finished(self) -> list[LrTrialResult]:
        """Every learning rate that was tried, in order."""
        with self._kept.guarded("read"):
            return [
                LrTrialResult(
                    trial.params[RATE],
                    trial.user_attrs.get("loss"),
                    trial.user_attrs.get("first"),
                    trial.user_attrs.get("failure", "nothing is known of it"),
                )
                for trial in self._kept.of(TrialState.COMPLETE)
                if RATE in trial.params
            ]

    def _value(self, tried: LrTrialResult) -> float:
        """A loss that grew beyond all bounds would flatten all differences between the others."""
        if tried.failure is None and tried.loss is not None:
            return tried.loss
        values = [one.value for one in self._kept.of(TrialState.COMPLETE) if one.value is not None]
        worst = max(values, default=tried.first or 0.0)
        return worst if tried.loss is None else min(worst, tried.loss)


class TrialRequest(NamedTuple):
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
        axes: Sequence[SearchAxis],
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
        self._kept = OptunaStudy(
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

    def ask(self) -> TrialRequest | None:
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
                    return TrialRequest(trial, values)
                # Samplers repeat points by design; a repeat costs nothing.
                self._close_repeat(trial, done.get(key_of(values)))
                self._enqueue_unseen(taken)

    def tell(self, asked: TrialRequest, found: Measurement) -> None:
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

    def abandon(self, asked: TrialRequest) -> None:
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
