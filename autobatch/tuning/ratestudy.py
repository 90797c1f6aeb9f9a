"""A study of one learning rate in Optuna's hands, on a logarithmic scale around the default.

A trial that diverges, or that the pruner ends, is COMPLETE and infeasible: samplers learn nothing from what
is failed or pruned, and what is infeasible is never the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import MedianPruner
from optuna.trial import TrialState

from autobatch.tuning.keeping import Kept, values_of
from autobatch.tuning.sampler import NumberedSampler
from autobatch.tuning.shortrun import PARTS, REACH, Tried

RATE = "learning_rate"
FIRST_LOOK = (1.0, 4.0, 1 / 4, 16.0, 1 / 16)
"""The first trials, in shares of the default: the whole range, before a model has its say."""
TRAINS = "does_not_train"
"""Constraint: it diverged, was ended, or raised an error."""
STARTUP = 4
"""Trials that are run to their end before any is ended early."""
WARM_PARTS = PARTS // 2
"""Parts of a run before which none is ended: a small learning rate is slow at first."""


class AskedRate(NamedTuple):
    """A learning rate to try."""

    trial: optuna.Trial
    rate: float
    known: Tried | None
    """What it came to, where it was tried before: samplers repeat points by design."""


class RateStudy:
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
        self._kept = Kept(
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

    def ask(self) -> AskedRate:
        """A learning rate to try; the first is the default."""
        with self._kept.guarded("used"):
            trial = self._kept.ask()
            low, high = self._default / REACH, self._default * REACH
            rate = trial.suggest_float(RATE, low, high, log=True)
            return AskedRate(trial, rate, next((one for one in self.finished() if one.rate == rate), None))

    def is_hopeless(self, asked: AskedRate, part: int, loss: float) -> bool:
        """Keep the loss of a part; whether it is worse than the median of the trials before (Optuna's
        ``MedianPruner``). The default always runs to its end: all others are held against it.
        """
        with self._kept.guarded("written"):
            asked.trial.report(loss, part)
            return asked.rate != self._default and asked.trial.should_prune()

    def tell(self, asked: AskedRate, tried: Tried) -> None:
        """Keep what a trial came to: its loss, and no more than the worst so far where it is infeasible."""
        with self._kept.guarded("written"), suppress(UpdateFinishedTrialError):
            for name in ("loss", "first", "failure"):
                asked.trial.set_user_attr(name, getattr(tried, name))
            asked.trial.set_constraint(TRAINS, -1.0 if tried.failure is None else 1.0)
            self._kept.study.tell(asked.trial, self._value(tried))

    def abandon(self, asked: AskedRate) -> None:
        """Close a trial that is not going to end."""
        self._kept.abandon(asked.trial)

    def finished(self) -> list[Tried]:
        """Every learning rate that was tried, in order."""
        with self._kept.guarded("read"):
            return [
                Tried(
                    trial.params[RATE],
                    trial.user_attrs.get("loss"),
                    trial.user_attrs.get("first"),
                    trial.user_attrs.get("failure", "nothing is known of it"),
                )
                for trial in self._kept.of(TrialState.COMPLETE)
                if RATE in trial.params
            ]

    def _value(self, tried: Tried) -> float:
        """A loss that grew beyond all bounds would flatten all differences between the others."""
        if tried.failure is None and tried.loss is not None:
            return tried.loss
        values = [one.value for one in self._kept.of(TrialState.COMPLETE) if one.value is not None]
        worst = max(values, default=tried.first or 0.0)
        return worst if tried.loss is None else min(worst, tried.loss)
