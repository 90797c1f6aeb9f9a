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
from typing import Any, NamedTuple

import optuna
import torch
from msgspec.structs import replace
from optuna.distributions import CategoricalDistribution

from autobatch.core.errors import Infeasible
from autobatch.core.options import Options, parse_knobs
from autobatch.core.progress import Progress
from autobatch.core.records import (
    CHANNELS_LAST,
    COMPILE,
    LOADER_WORKERS,
    OPTIMIZER,
    PRECISION,
    SPLIT,
    Configuration,
    Plan,
    Trial,
    Tuning,
    Value,
)
from autobatch.device.host import usable_cores
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.setup import Setup
from autobatch.report.facts import knobs_in_words
from autobatch.step.train_state import stand_in_optimizers
from autobatch.tuning.study import open_study, run_trials, tried
from autobatch.tuning.trial import Trials, compare
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import preserved_random_state

DEFAULT_TRIALS = 8
"""Configurations that are measured if no number was asked for."""
RUN_SHARE = 0.25
"""Share of the run's time after which ``fit`` starts no further trial, if nothing was asked for."""
WORTH_OFFERING = 1.05
"""The least that a choice must gain to be offered."""


EXACT = (SPLIT, LOADER_WORKERS)
"""Knobs of which no choice changes the memory of a micro-batch, or a result by rounding. Others are tuned
only if the user names them. Workers draw other random numbers."""
NOTICEABLE_S = 0.005
"""Seconds that loading a micro-batch must take before workers are tuned by default: handing one over takes a
millisecond."""
WORTH_COMPILING = 500
"""Optimizer steps from which compiling, half a minute in each trial that tries it, may pay off."""
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused step on GPUs and on the CPU."""


class Knob(NamedTuple):
    """A knob of a workload on a device."""

    name: str
    choices: tuple[Value, ...]
    """The values that it may have, the default first."""
    lacks: str = ""
    """Reason why it has one value only, or none."""
    pays_off: bool = True
    """False if it is only tuned if the user names it, and not offered."""


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
        if len(history) < self.budget:  # a search ends before only by its deadline
            limit = "--timeout" if self.worth_samples == math.inf else "a quarter of the training"
            note = f"the time for tuning ({limit}) was over after {len(history)} of {self.budget} trials"
            tuning = replace(tuning, notes=[note])
        tuning = replace(
            tuning,
            trials=len(history),
            history=history,
            baseline_samples_per_s=speed,
            best_samples_per_s=speed,
        )
        if best != default:
            self.progress.doing("comparing the best with the default")
            try:
                beside = compare(self.trials.measure, {}, best)
            except Infeasible as reason:
                note = f"kept the default: the fastest configuration fails: {reason}"
                tuning = replace(tuning, notes=[*tuning.notes, note])
            else:
                if beside.is_faster:
                    tuning = replace(
                        tuning,
                        best=best,
                        changes=self._changes(best),
                        baseline_samples_per_s=beside.base,
                        best_samples_per_s=beside.base * beside.ratio,
                        low=beside.low,
                    )
        offers = [self._offer(tuning, knob) for knob in self.offers if time.monotonic() < deadline]
        return replace(tuning, offers=[*filter(None, offers)])

    def _changes(self, values: Configuration) -> dict[str, Value]:
        """Return the values that differ from the default."""
        default = defaults(self.knobs)
        return {name: value for name, value in values.items() if value != default[name]}

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
        best, changed = self._best(), self._changes(values)
        trial = Trial(number=number, parameters=values, relative=1.0, samples_per_s=speed)
        if changed:
            self.progress.doing(f"trial {number + 1} of {self.budget}")
            try:
                beside = compare(self.trials.measure, best.parameters, values)
                trial = replace(
                    trial,
                    relative=(best.relative or 1.0) * beside.ratio,
                    is_faster=beside.is_faster,
                    samples_per_s=beside.other,
                    micro_batch=self.trials.sizes(values)[0],
                )
            except Infeasible as reason:
                trial = Trial(number=number, parameters=values, note=str(reason))
        self.progress.measured(trial, self.budget, changed)
        return trial.relative, trial

    def _offer(self, tuning: Tuning, knob: Knob) -> str | None:
        """Return the words that ask for the fastest choice of a knob; None if it is not worth it."""
        lows: dict[Value, float] = {}
        for value in knob.choices[1:]:
            self.progress.doing(f"looking at {knobs_in_words({knob.name: value})}")
            with suppress(Infeasible):
                beside = compare(self.trials.measure, tuning.best, {**tuning.best, knob.name: value})
                lows[value] = beside.low or 0.0
        value = max(lows, key=lambda value: lows[value], default=None)
        if lows.get(value, 0.0) < WORTH_OFFERING:
            return None
        names = ",".join([*tuning.changes, knob.name])
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
        refusals = self.ranks.gather(trials.refusal(tuning.changes)) if tuning.changes else []
        if failures := [reason for reason in refusals if reason is not None]:
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
        sizes = trials.sizes(tuning.changes)
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
        asked = None if options.knobs is None else parse_knobs(options.knobs)
        about = asked, plan.micro_batch, self.planned_steps, workers
        knobs, offers, notes = self.process.call(act, choose_knobs, *about)
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


def choose_knobs(
    setup: Setup, asked: Sequence[str] | None, micro_batch: int, planned_steps: int, workers: int | None
) -> tuple[list[Knob], list[Knob], list[str]]:
    """Return the knobs to tune, those to offer, and a note for each that was asked for and has no choice.

    Args:
        setup: the workload and the device.
        asked: names of those to tune, and none to offer; None for those that pay off and change no number.
        micro_batch: that of the plan, which is the largest that may be used.
        planned_steps: optimizer steps of the run.
        workers: the loader workers that were asked for; None if none were.
    """
    device, cores = setup.device, usable_cores()
    others = device.native_precisions() if setup.precision == "fp32" else ()
    is_compiled = device.compiler_missing is None
    is_image = any(p.dim() == 4 for p in setup.model.parameters()) and any(
        tensor.dim() == 4 for tensor in tensors_of(setup.worst_case.batch(2))
    )
    counts = [count for count in (2, 4, 8, 16) if count <= cores and workers is None]
    knobs = [
        Knob(SPLIT, tuple(range(min(4, micro_batch.bit_length()))), "the micro-batch is a single sample"),
        Knob(
            PRECISION,
            (setup.precision, *(name for name in others if name != setup.precision)),
            "--precision was given, or the device has only one native precision",
        ),
        Knob(
            COMPILE,
            ("off", "default") if is_compiled else (),
            device.compiler_missing or "",
            pays_off=device.gains_from_compile and planned_steps >= WORTH_COMPILING,
        ),
        Knob(
            CHANNELS_LAST,
            (False, True) if is_image else (),
            "the model has no 4-D weights, or its batches have no 4-D tensors",
        ),
        Knob(
            OPTIMIZER,
            _implementations(setup),
            "the workload's optimizer has only one implementation, or the workload chose it",
        ),
        Knob(
            LOADER_WORKERS,
            (0, *counts),
            "this process may use a single core" if workers is None else "the number of workers is given",
            pays_off=bool(counts) and _fetch_seconds(setup, micro_batch) >= NOTICEABLE_S,
        ),
    ]
    wanted = [knob for knob in knobs if (knob.pays_off if asked is None else knob.name in asked)]
    lacking = [knob for knob in wanted if len(knob.choices) < 2]
    tuned = [one for one in wanted if one not in lacking and (asked is not None or one.name in EXACT)]
    offered = [knob for knob in wanted if knob not in lacking and knob not in tuned]
    notes = [f"{knob.name} is not tuned: {knob.lacks}" for knob in lacking if asked is not None]
    return tuned, offered, notes


def defaults(knobs: Sequence[Knob]) -> dict[str, Value]:
    """Return every knob at its default."""
    return {knob.name: knob.choices[0] for knob in knobs}


def _implementations(setup: Setup) -> tuple[str, ...]:
    """Return the implementations of the workload's optimizer that are left to choose, ``default`` first."""
    made = stand_in_optimizers(setup.workload)
    if not made or any(
        optimizer.defaults.get("fused") is not None or optimizer.defaults.get("foreach", True) is not None
        for optimizer in made
    ):
        return ("default",)
    is_fusible = all(type(optimizer) in FUSED for optimizer in made)
    return tuple(name for name in setup.device.optimizer_implementations if name != "fused" or is_fusible)


def _fetch_seconds(setup: Setup, size: int) -> float:
    """Return the seconds that fetching and collating the most expensive micro-batch takes, once warm."""
    with preserved_random_state():
        setup.worst_case.batch(size)
        start = setup.clock()
        setup.worst_case.batch(size)
        return setup.clock() - start
