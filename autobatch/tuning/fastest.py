"""Search for the fastest configuration of a plan.

    the default ──► one change at a time from the best so far ──► what Optuna proposes ──► the best beside the
    default in new rounds: the answer ──► what would change numbers, each change alone: only offered

A configuration becomes the best only if it is faster than the best so far beyond the noise. Of many, one may
be so by chance. So it is chosen only if new rounds beside the default show it again, and the bound of these
rounds is the one to quote. Numbers that nobody asked to change stay: a knob that changes them is chosen only
if ``--knobs`` names it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from msgspec.structs import replace
from optuna.distributions import CategoricalDistribution

from autobatch.core.errors import Infeasible
from autobatch.core.knobs import PRECISION, SPLIT, Configuration, parse_knobs
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Trial, Tuning
from autobatch.distributed.ranks import Ranks
from autobatch.planning import micro_batches
from autobatch.rehearsal.process import SetupProcess
from autobatch.report.facts import knobs_in_words
from autobatch.tuning.space import Knob, changes, choose_knobs, defaults, knobs_of
from autobatch.tuning.study import open_study, run_trials, tried
from autobatch.tuning.trial import Comparison, Trials, compare

DEFAULT_TRIALS = 8
"""Configurations that are measured if no number was asked for."""
RUN_SHARE = 0.25
"""Share of the run's time after which ``fit`` starts no further trial, if nothing was asked for."""
WORTH_OFFERING = 1.05
"""The least that a choice must gain to be offered."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search on one process."""

    trials: Trials
    study: optuna.Study
    knobs: Sequence[Knob]
    """Knobs to choose."""
    offers: Sequence[Knob] = ()
    """Knobs that are measured beside the answer, and never chosen."""
    budget: int = DEFAULT_TRIALS
    """Trials, with those of earlier runs and of other processes on the same study."""
    deadline: float = math.inf
    """Monotonic time after which no trial starts."""
    worth_samples: float = math.inf
    """Samples after whose training time no further trial starts."""
    progress: Progress

    def find(self) -> Tuning:
        """Run the trials, and choose the fastest configuration; the default if none is faster.

        Raises:
            AutobatchError: the file of the study failed.
            Exception: whatever the workload raises with every knob at its default, except out of memory.
        """
        start, default = time.monotonic(), defaults(self.knobs)
        tuning = Tuning(best=default, study=self.study.study_name)
        self.progress.doing("measuring the default")
        try:
            speed = self.trials.measure({})
        except Infeasible as reason:
            return replace(tuning, notes=[f"kept the plan: the default could not be measured: {reason}"])
        deadline = min(self.deadline, start + self.worth_samples / speed)
        run_trials(
            self.study,
            partial(self._try, speed),
            space={knob.name: CategoricalDistribution(knob.choices) for knob in self.knobs},
            first=self._one_change_each,
            trials=self.budget,
            deadline=deadline,
        )
        history, best = tried(self.study, Trial), self._best().parameters
        found: dict[str, Any] = {"baseline_samples_per_s": speed, "best_samples_per_s": speed}
        if best != default:
            found |= self._beside_default(best)
        tuning = replace(tuning, trials=len(history), history=history, **found)
        offers = [self._offer(tuning.best, knob) for knob in self.offers if time.monotonic() < deadline]
        return replace(tuning, offers=[*filter(None, offers)])

    def _best(self) -> Trial:
        """Return the fastest trial so far, which is the default if no other one has shown to be faster."""
        default = Trial(number=0, parameters=defaults(self.knobs), relative=1.0)
        faster = [trial for trial in tried(self.study, Trial) if trial.is_faster]
        return max(faster, key=lambda trial: trial.relative or 0.0, default=default)

    def _one_change_each(self) -> list[dict[str, Any]]:
        """Return the default, and what differs in one knob from the best so far."""
        best = self._best().parameters
        changed = [{**best, knob.name: choice} for knob in self.knobs for choice in knob.choices]
        return [defaults(self.knobs), *(values for values in changed if values != best)]

    def _try(self, speed: float, number: int, values: dict[str, Any]) -> tuple[float | None, Trial]:
        """Measure a configuration beside the best so far."""
        best, changed = self._best(), changes(values, defaults(self.knobs))
        found: dict[str, Any] = {"relative": 1.0, "samples_per_s": speed}
        if changed:
            self.progress.doing(f"trial {number + 1} of {self.budget}")
            try:
                beside = self._compare(best.parameters, values)
                found = {"relative": (best.relative or 1.0) * beside.ratio, "is_faster": beside.is_faster}
                found |= {"samples_per_s": beside.other, "micro_batch": self.trials.sizes(changed)[0]}
            except Infeasible as reason:
                found = {"note": str(reason)}
        trial = Trial(number=number, parameters=values, **found)
        self.progress.measured(trial, self.budget, changed)
        return trial.relative, trial

    def _compare(self, base: Configuration, values: Configuration) -> Comparison:
        default = defaults(self.knobs)
        return compare(self.trials.measure, changes(base, default), changes(values, default))

    def _beside_default(self, best: Configuration) -> dict[str, Any]:
        """Measure the best beside the default in new rounds; return the fields of the result about it."""
        self.progress.doing("comparing the best with the default")
        try:
            beside = self._compare({}, best)
        except Infeasible as reason:
            return {"notes": [f"kept the default: the fastest configuration fails: {reason}"]}
        if not beside.is_faster:
            return {}
        return {
            "best": best,
            "changes": changes(best, defaults(self.knobs)),
            "baseline_samples_per_s": beside.base,
            "best_samples_per_s": beside.base * beside.ratio,
            "low": beside.low,
        }

    def _offer(self, chosen: Configuration, knob: Knob) -> str | None:
        """Return the words that ask for the fastest choice of a knob; None if it is not worth it."""
        lows: dict[Any, float] = {}
        for value in knob.choices[1:]:
            self.progress.doing(f"looking at {knobs_in_words({knob.name: value})}")
            with suppress(Infeasible):
                lows[value] = self._compare(chosen, {**chosen, knob.name: value}).low or 0.0
        value = max(lows, key=lambda value: lows[value], default=None)
        if lows.get(value, 0.0) < WORTH_OFFERING:
            return None
        names = ",".join([*changes(chosen, defaults(self.knobs)), knob.name])
        add = f"--precision {value}" if knob.name == PRECISION else f"--knobs {names}"
        words = knobs_in_words({knob.name: value})
        return f"{words} is at least {lows[value]:.2f} × faster here: add {add}"


@dataclass(frozen=True, kw_only=True)
class Tuner:
    """Tuner of a plan, in the process that holds its setup.

    Over ranks, rank 0 tunes alone, at its share of the batch, and every rank confirms the choice.
    """

    process: SetupProcess
    options: Options
    planned_steps: int
    """Optimizer steps of the run that is tuned for."""
    home: Path
    """Data directory, in which studies are kept."""
    progress: Progress
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that train together; all of them make the same calls."""
    deadline: float = math.inf
    """Monotonic time after which no trial starts."""

    def tune(self, plan: Plan) -> tuple[Plan, Tuning]:
        """Find the fastest configuration of a plan, and put it into the plan; the effective batch stays.

        Raises:
            AutobatchError: the study failed, or the workload does not run with every knob at its default.
        """
        asked = self.options.workers
        workers = self.process.info.workers if asked is None else asked
        trials = Trials(process=self.process, plan=plan, workers=workers)
        tuning = self.ranks.once(lambda: self._search(trials).find())
        confirmed = self.ranks.gather(trials.confirm(tuning.changes)) if tuning.changes else []
        if failures := [answer for answer in confirmed if isinstance(answer, str)]:
            tuning = replace(
                tuning,
                best={},
                changes={},
                best_samples_per_s=tuning.baseline_samples_per_s,
                low=None,
                notes=[*tuning.notes, f"kept the plan: the fastest configuration fails: {failures[0]}"],
            )
        for line in tuning.notes:
            self.progress.note(line)
        if not tuning.changes:
            return plan, tuning
        sizes = micro_batches(sum(plan.micro_batches), min(map(int, confirmed)), plan.multiple)
        plan = replace(
            plan,
            micro_batch=sizes[0],
            accumulation_steps=len(sizes),
            micro_batches=sizes,
            precision=tuning.changes.get(PRECISION) or plan.precision,
            # The split is the plan itself.
            knobs={name: value for name, value in tuning.changes.items() if name not in (SPLIT, PRECISION)},
        )
        return plan, tuning

    def _search(self, trials: Trials) -> Search:
        """Return the search among the configurations that apply here."""
        options, act = self.options, "looking for what can be tuned"
        self.progress.doing(act)
        plan, workers = trials.plan, trials.workers
        known = self.process.call(act, knobs_of, plan.micro_batch, self.planned_steps, workers)
        asked = None if options.knobs is None else parse_knobs(options.knobs)
        knobs, offers, notes = choose_knobs(known, asked)
        for line in notes:
            self.progress.note(line)
        is_unasked = options.command == "fit" and options.trials is None and options.timeout is None
        purpose = {knob.name: knob.choices for knob in knobs}, workers
        samples = sum(plan.micro_batches) * self.planned_steps
        return Search(
            trials=trials,
            study=open_study(self.process.info, options, self.home, "maximize", *purpose),
            knobs=knobs,
            offers=offers,
            budget=min(
                DEFAULT_TRIALS if options.trials is None else options.trials,
                math.prod(len(knob.choices) for knob in knobs),
            ),
            deadline=self.deadline,
            worth_samples=RUN_SHARE * samples if is_unasked else math.inf,
            progress=self.progress,
        )
