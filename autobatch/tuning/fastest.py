"""Search for the fastest configuration of a plan.

    the default ──► one change at a time from the best so far ──► what Optuna proposes ──► the best beside the
    default in new rounds: the answer ──► what would change numbers, each change alone: only offered

A configuration becomes the best only if it is faster than the best so far beyond the noise. Of many, one may
be so by chance. So it is chosen only if new rounds beside the default show it again, and the bound of these
rounds is the one to quote. Numbers that nobody asked to change stay: a knob that changes them is chosen only
if ``--knobs`` names it.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from optuna.distributions import BaseDistribution, CategoricalDistribution

from autobatch.core.errors import Infeasible
from autobatch.core.knobs import (
    PRECISION,
    Configuration,
    SearchAxis,
    applicable,
    defaults,
    offered,
    parse_knobs,
)
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Trial, Tuning
from autobatch.distributed.ranks import Ranks
from autobatch.planning import micro_batches
from autobatch.rehearsal.process import SetupProcess
from autobatch.report.words import knobs_in_words
from autobatch.tuning.compare import ROUNDS, Comparison, compare
from autobatch.tuning.space import changes, look_at_workload, neighbours
from autobatch.tuning.study import Direction, Point, Study, open_study
from autobatch.tuning.trial import Trials

DEFAULT_TRIALS = 8
"""Configurations that are measured if no number was asked for."""
RUN_SHARE = 0.25
"""Share of the run's time after which ``fit`` starts no further trial, if nothing was asked for."""
WORTH_OFFERING = 1.05
"""The least that a choice must gain to be offered."""
NOT_A_PURPOSE = ("budget_bytes", "total_bytes")
"""Fields of the key that do not belong to a study, because free memory makes no configuration fast."""


class Answer(NamedTuple):
    """Answer of a search."""

    tuning: Tuning
    micro_batch: int = 0
    """Of the fastest configuration; 0 if the default is kept."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search on one process."""

    trials: Trials
    study: Study
    axes: Sequence[SearchAxis]
    """The choices of each knob."""
    offers: Sequence[SearchAxis] = ()
    """Choices that are measured beside the answer, and never chosen."""
    budget: int = DEFAULT_TRIALS
    """Trials, with those of earlier runs and of other processes on the same study."""
    expired: Callable[[], bool] = lambda: False
    """Asked before every trial whether the time is over."""
    run_share: float = math.inf
    """Share of the run's time after which no further trial starts."""
    progress: Progress

    def find(self) -> Answer:
        """Run the trials, and return the fastest configuration.

        Raises:
            AutobatchError: the storage failed.
            Exception: whatever the workload raises with every knob at its default, except out of memory.
        """
        start, trials, default = time.monotonic(), self.trials, defaults(self.axes)
        kept = Tuning(best=default, study=self.study.name)
        self.progress.doing("measuring the default")
        try:
            speed = trials.measure(default).samples_per_s
        except Infeasible as reason:
            note = f"kept the plan: the default configuration could not be measured: {reason}"
            return Answer(msgspec.structs.replace(kept, notes=[note]))
        allowed = self.run_share * trials.samples * trials.planned_steps / speed

        def is_over() -> bool:
            return self.expired() or time.monotonic() - start > allowed

        self.study.run(
            partial(self._try, speed),
            lambda: [default, *neighbours(self._best().parameters, self.axes)],
            self.budget,
            is_over,
        )
        tried, notes = self._tried(), []
        if time.monotonic() - start > allowed and len(tried) < self.budget:
            notes.append(
                f"tuning stopped after {len(tried)} of {self.budget} trials and {self.run_share:.0%} of the "
                f"time that training takes: give --trials {self.budget} to run them all"
            )
        best, beside, micro_batch = self._best().parameters, None, 0
        if best != default:
            try:
                micro_batch = trials.confirm(best)
                beside = self._beside(default, best, "comparing the best with the default")
            except Infeasible as reason:
                notes.append(f"kept the default: the fastest configuration fails: {reason}")
        fields: dict[str, Any] = {"best_samples_per_s": speed, "baseline_samples_per_s": speed}
        if beside is None or not beside.is_faster:
            best, micro_batch = default, 0
        else:
            base = beside.base.samples_per_s
            fields = {"best_samples_per_s": base * beside.ratio, "baseline_samples_per_s": base}
            fields |= {"changes": changes(best, default), "low": beside.low, "high": beside.high}
        offers = [self._offer(best, axis) for axis in self.offers if not is_over()]
        fields |= {"best": best, "trials": len(tried), "history": tried, "notes": notes}
        fields |= {"offers": [*filter(None, offers)], "seconds": time.monotonic() - start}
        return Answer(msgspec.structs.replace(kept, **fields), micro_batch)

    def _tried(self) -> list[Trial]:
        # Processes that share a study may have given the same number.
        tried = enumerate(self.study.tried())
        return [msgspec.convert({**facts, "number": number}, Trial) for number, facts in tried]

    def _best(self) -> Trial:
        """Return the fastest trial so far, which is the default if no other one has shown to be faster."""
        default = Trial(number=0, parameters=defaults(self.axes), relative=1.0)
        faster = [trial for trial in self._tried() if trial.is_faster]
        return max(faster, key=lambda trial: trial.relative or 0.0, default=default)

    def _try(self, speed: float, values: Point) -> tuple[float | None, dict[str, Any]]:
        best, number, default = self._best(), len(self.study.tried()), defaults(self.axes)
        trial = Trial(number=number, parameters=values, relative=1.0, samples_per_s=speed)
        if values != default:
            try:
                beside = self._beside(best.parameters, values, f"trial {number + 1} of {self.budget}")
            except Infeasible as reason:
                changed: dict[str, Any] = {"relative": None, "samples_per_s": None, "note": str(reason)}
            else:
                changed = {"relative": (best.relative or 1.0) * beside.ratio, "is_faster": beside.is_faster}
                changed |= beside.other._asdict()
            trial = msgspec.structs.replace(trial, **changed)
            self.progress.measured(trial, self.budget, changes(values, default))
        return trial.relative, msgspec.to_builtins(trial)

    def _beside(self, base: Configuration, values: Configuration, act: str) -> Comparison:
        def announce(number: int) -> None:
            self.progress.doing(f"{act}, round {number} of at most {ROUNDS}")

        return compare(self.trials.measure, base, values, announce)

    def _offer(self, chosen: Configuration, axis: SearchAxis) -> str | None:
        """Return the words that ask for the fastest choice of a knob; None if it is not worth it."""
        lows: dict[Any, float] = {}
        for value in axis.choices[1:]:
            act = f"looking at {knobs_in_words({axis.name: value})}"
            with suppress(Infeasible):
                lows[value] = self._beside(chosen, {**chosen, axis.name: value}, act).low or 0.0
        value = max(lows, key=lambda value: lows[value], default=None)
        if lows.get(value, 0.0) < WORTH_OFFERING:
            return None
        names = ",".join([*changes(chosen, defaults(self.axes)), axis.name])
        add = f"--precision {value}" if axis.name == PRECISION else f"--knobs {names}"
        words = knobs_in_words({axis.name: value})
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
    expired: Callable[[], bool] = lambda: False
    """Asked before every trial whether the time is over."""

    def tune(self, plan: Plan) -> tuple[Plan, Tuning]:
        """Find the fastest configuration of a plan, and put it into the plan; the effective batch stays.

        Args:
            plan: the plan with every knob at its default, whose micro-batch fits.

        Raises:
            AutobatchError: the storage failed, or the workload does not run with every knob at its default.
        """
        options, info = self.options, self.process.info
        caps = (options.target_batch, options.search.max_micro_batch, info.samples)
        trials = Trials(
            process=self.process,
            limit=plan.micro_batch,
            multiple=plan.multiple,
            cap=min(cap for cap in caps if cap is not None),
            samples=sum(plan.micro_batches),
            planned_steps=self.planned_steps,
            workers=info.workers if options.train.workers is None else options.train.workers,
        )
        (tuning, micro_batch), of_rank_0 = self.ranks.once(lambda: self._find_fastest(trials))
        chosen = plan
        if micro_batch:
            trials = replace(trials, defaults=of_rank_0)
            chosen, tuning = self._with_choice(plan, Answer(tuning, micro_batch), trials)
        for line in tuning.notes:
            self.progress.note(line)
        self.progress.tuned(tuning)
        if chosen != plan:
            self.progress.planned(chosen)
        return chosen, tuning

    def open_study(
        self,
        space: Mapping[str, BaseDistribution],
        made_for: Mapping[str, Any],
        *,
        direction: Direction,
        metric: str,
        suffix: str = "",
    ) -> Study:
        """Open the study of everything that its results depend on, in ``--storage`` or the data directory."""
        info, device = self.process.info, self.options.device
        content = {
            "key": {name: value for name, value in info.key.items() if name not in NOT_A_PURPOSE},
            "asked": [self.options.target_batch, device.memory_budget, self.options.search.max_micro_batch],
            "space": str(space),
            **made_for,
        }
        digest = hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:12]
        name = f"{info.name}-{digest}{suffix}"
        storage = self.options.tune.storage or self._file(name)
        return open_study(name, storage, space, direction=direction, metric=metric, seed=device.seed)

    def _find_fastest(self, trials: Trials) -> tuple[Answer, Configuration]:
        """Return the answer on this rank, and the default of every knob that was looked at."""
        tune, act = self.options.tune, "looking for what can be tuned"
        self.progress.doing(act)
        size = micro_batches(trials.samples, trials.limit, trials.multiple)[0]
        context = self.process.call(act, look_at_workload, size, trials.planned_steps, trials.workers)
        axes, notes = applicable(context, None if tune.knobs is None else parse_knobs(tune.knobs))
        for line in notes:
            self.progress.note(line)
        offers = offered(context) if tune.knobs is None else []
        space = {axis.name: CategoricalDistribution(axis.choices) for axis in axes}
        made_for = {"workers": trials.workers, "steps": trials.planned_steps if "compile" in space else None}
        is_unasked = self.options.command == "fit" and tune.trials is None and tune.timeout is None
        search = Search(
            trials=replace(trials, defaults=defaults([*axes, *offers])),
            study=self.open_study(space, made_for, direction="maximize", metric="speed ÷ default's"),
            axes=axes,
            offers=offers,
            budget=DEFAULT_TRIALS if tune.trials is None else tune.trials,
            expired=self.expired,
            run_share=RUN_SHARE if is_unasked else math.inf,
            progress=self.progress,
        )
        return search.find(), search.trials.defaults

    def _with_choice(self, plan: Plan, answer: Answer, trials: Trials) -> tuple[Plan, Tuning]:
        """Put the choice into the plan, if every rank can run it."""
        (tuning, micro_batch), failure = answer, None
        if self.ranks.rank:
            try:
                micro_batch = trials.confirm(tuning.best)
            except Infeasible as reason:
                failure = str(reason)
        confirmed = self.ranks.gather((failure, micro_batch))
        for rank, (line, _) in enumerate(confirmed):
            if line is None:
                continue
            note = f"kept the plan: the fastest configuration fails on rank {rank}: {line}"
            kept: dict[str, Any] = {"best": dict(trials.defaults), "changes": {}, "low": None, "high": None}
            kept |= {"best_samples_per_s": tuning.baseline_samples_per_s, "notes": [*tuning.notes, note]}
            return plan, msgspec.structs.replace(tuning, **kept)
        sizes = micro_batches(sum(plan.micro_batches), min(size for _, size in confirmed), plan.multiple)
        # Knobs at their default are left out, and the split is the plan itself.
        knobs = trials.changes(tuning.best)
        chosen = msgspec.structs.replace(
            plan,
            micro_batch=sizes[0],
            accumulation_steps=len(sizes),
            micro_batches=sizes,
            precision=knobs.pop(PRECISION, None) or plan.precision,
            knobs=knobs,
        )
        return chosen, tuning

    def _file(self, name: str) -> str | None:
        """Return the file of a study in the data directory; None to keep it in memory."""
        folder = self.home / "studies"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return str(folder / f"{name}.log")
        self.progress.note(
            f"the study is kept in memory and cannot be continued, because {folder} is not writable: give "
            "--storage, or set AUTOBATCH_HOME"
        )
        return None
