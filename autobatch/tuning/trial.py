"""Trials: the speed of a configuration, and the loss after a short run at a learning rate.

A configuration lists values of knobs; those that are missing have their default. An error makes it
infeasible, also memory that runs out, or a child process that crashes. Of an empty one, an error of the
workload is its own and is raised.

A machine is faster one minute than the next, so a speed counts only as a ratio to another one in the same
round. Of n independent ratios, at most one lies below the true median with a probability of (n + 1) ÷ 2ⁿ,
whatever their distribution. So the second smallest of nine is a lower bound of the true ratio in 98.0 % of
all comparisons (the sign test; Conover 1999, Practical Nonparametric Statistics, 3.2). One hiccup in nine
rounds does not move it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from autobatch.core.errors import Infeasible
from autobatch.core.records import COMPILE, LOADER_WORKERS, SPLIT, Configuration, Plan
from autobatch.device.oom import first_line
from autobatch.planning import micro_batches
from autobatch.rehearsal.process import ChildCrashed, SetupProcess
from autobatch.rehearsal.rehearsal import Batch, Outcome, Step, attempt, batch_of, rehearse
from autobatch.rehearsal.setup import Setup, with_knobs
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.feed import AHEAD, Feed
from autobatch.workload.order import Split, sampler_of
from autobatch.workload.rng import seed_everything

ROUNDS = 9
SPARED = 1
"""Ratios below the bound."""


class Comparison(NamedTuple):
    """Speed of a configuration beside that of another one."""

    ratio: float
    """Median of the ratios of the rounds."""
    low: float | None
    """Lower bound of the true ratio; None if it was clear earlier that it is not above 1."""
    base: float
    """Median speed of the other configuration, in samples per second."""
    other: float
    """That of the configuration."""

    @property
    def is_faster(self) -> bool:
        """True if the configuration is faster than the other one beyond the noise."""
        return self.low is not None and self.low > 1


def compare(
    measure: Callable[[Configuration], float], base: Configuration, other: Configuration
) -> Comparison:
    """Measure two configurations in turn, until the other one cannot be shown to be faster any more.

    Raises:
        Infeasible: one of them fails.
    """
    bases: list[float] = []
    others: list[float] = []
    ratios: list[float] = []
    while len(ratios) < ROUNDS and sum(ratio <= 1 for ratio in ratios) <= SPARED:
        # Neither always runs after the other one.
        for values, speeds in [(base, bases), (other, others)][:: -1 if len(ratios) % 2 else 1]:
            speeds.append(measure(values))
        ratios.append(others[-1] / bases[-1])
    low = sorted(ratios)[SPARED] if len(ratios) == ROUNDS else None
    return Comparison(statistics.median(ratios), low, statistics.median(bases), statistics.median(others))


ROUND_SECONDS = 0.1
"""Approximate time that a configuration is timed for in each round of a comparison."""
LEAST_STEPS = 2
"""Steps that are timed, however long they take."""
ACCUMULATED = 2
"""Micro-batches of a timed step: like most of a step, the second one adds to existing gradients."""
FED = 8
"""Micro-batches of a timed step that workers feed: they fetch during the optimizer step too, and its share of
their time must be small."""
ENDLESS = 2**62
"""Steps of batches that are drawn until they have taken long enough."""


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Trials of a plan in the process that holds the setup."""

    process: SetupProcess
    plan: Plan
    """With every knob at its default."""
    workers: int | None = None
    """Loader workers that were asked for; None if none were."""

    def measure(self, values: Configuration) -> float:
        """Time the steps of a configuration, and return its samples per second.

        Raises:
            Infeasible: the configuration must not be chosen.
            Exception: whatever the workload raises with every knob at its default, except out of memory.
        """
        sizes = self.sizes(values)
        call = self.process, time_steps, values, not values, sizes, self.workers or 0
        return sum(sizes) / float(call_with(*call))

    def refusal(self, values: Configuration) -> str | None:
        """Return the reason why a configuration does not run within the budget; None if it does."""
        try:
            attempted: Outcome = call_with(self.process, attempt, values, False, self.sizes(values)[0])
        except Infeasible as reason:
            return str(reason)
        return attempted.attempt.reason

    def sizes(self, values: Configuration) -> list[int]:
        """Return the micro-batches of a step: at most that of the plan, halved as a configuration says."""
        multiple = self.plan.multiple
        size = multiple * max(1, self.plan.micro_batch // multiple >> int(values.get(SPLIT) or 0))
        return micro_batches(sum(self.plan.micro_batches), size, multiple)


def call_with(
    process: SetupProcess, function: Callable[..., Any], values: Configuration, is_own: bool, *args: Any
) -> Any:
    """Call a function with the setup of a configuration in the process that holds the setup.

    Raises:
        Infeasible: the function raised it or another error, or crashed the process.
        Exception: whatever the function raises, if an error is the workload's own.
    """
    try:
        return process.call("a trial", _with_knobs, function, dict(values), *args)
    except Exception as error:
        if isinstance(error, Infeasible) or (is_own and not isinstance(error, ChildCrashed)):
            raise
        reason = first_line(error)
    # Outside the except block, nothing keeps the failed step's tensors alive.
    raise Infeasible(reason)


def _with_knobs(setup: Setup, function: Callable[..., Any], values: Configuration, *args: Any) -> Any:
    return function(with_knobs(setup, values), *args)


def time_steps(setup: Setup, sizes: list[int], workers: int) -> float:
    """Return the seconds of an optimizer step in these micro-batches.

    Micro-batches and what comes once per step are timed apart, on temporary weights, for about
    `ROUND_SECONDS`. The number of loader workers is used unless the configuration has one.

    Raises:
        Infeasible: the configuration runs out of memory, or its loss is not finite.
        Exception: whatever running the configuration raises.
    """
    workers, size = int(setup.knobs.get(LOADER_WORKERS, workers) or 0), sizes[0]
    in_a_step = min(FED if workers else ACCUMULATED, len(sizes))
    # Workers have fetched in advance for the first steps.
    first = 1 + math.ceil(workers * AHEAD / in_a_step)
    least = max(LEAST_STEPS, 2 * workers // in_a_step)
    is_compiled = setup.knobs.get(COMPILE, "off") != "off"
    # The second size makes a model compile again, for all sizes.
    warm_up = 2 * sorted(set(sizes), reverse=True) if is_compiled else []

    def batches() -> Generator[Batch]:
        for each in warm_up:
            for batch in sampler_of(setup.workload, each, steps=1).batches():
                yield batch_of(setup.workload, Split().parts(batch, each))
        drawn = sampler_of(setup.workload, size * in_a_step, steps=ENDLESS)
        split = Split()
        feed = Feed(setup.workload, drawn, split, workers=workers, device=setup.device.torch_device)
        with closing(feed):
            start = setup.clock()
            for batch in drawn.batches():
                if batch.index == first:
                    start = setup.clock()
                if batch.index >= first + least and setup.clock() - start >= ROUND_SECONDS:
                    return
                collated = ((micro, size) for micro in feed.collated(split.parts(batch, size), size))
                yield Batch(collated, in_a_step, batch_samples(setup.whole_batch, size, in_a_step))

    with closing(batches()) as timed:
        steps = rehearsed(setup, timed)
    # Later steps may diverge with any configuration, because the batch is not the target batch.
    judged = [step.result for step in steps[:2]]
    if any(result.count and not math.isfinite(result.loss) for result in judged):
        raise Infeasible("its loss is not finite")
    measured = steps[len(warm_up) + first :]
    # Workers finish several micro-batches at once, so that only a mean over many counts.
    middle = statistics.fmean if workers else statistics.median
    micro = middle(step.micro_seconds for step in measured)
    return micro * len(sizes) + middle(step.once_seconds for step in measured)


def short_run(setup: Setup, plan: Plan, seed: int, steps: int) -> float:
    """Train a few steps of a plan on temporary weights, and return the mean loss of the last quarter of them.

    The seed draws the batches and the model's random numbers.

    Raises:
        Infeasible: the run does not train.
        Exception: whatever the workload raises, except out of memory.
    """

    def batches() -> Iterator[Batch]:
        seed_everything(seed)
        for batch in sampler_of(setup.workload, plan.target_batch, seed, steps).batches():
            yield batch_of(setup.workload, Split(multiple=plan.multiple).parts(batch, plan.micro_batch))

    steps_taken = rehearsed(setup, batches(), learning_rate=plan.learning_rate)
    results = [step.result for step in steps_taken if step.result.count]
    last = [result for result in results[-len(results) // 4 :] if math.isfinite(result.loss)]
    # A loss scale that is still falling skips the first steps of a sound run in fp16.
    if not last or not all(result.applied for result in results[-1 if setup.precision == "fp16" else 0 :]):
        raise Infeasible("its loss or gradient is not finite")
    return sum(result.loss * result.count for result in last) / sum(result.count for result in last)


def rehearsed(setup: Setup, batches: Iterable[Batch], learning_rate: float | None = None) -> list[Step]:
    """Train on batches, and return the steps; raise `Infeasible` if memory runs out. See `rehearse`."""
    rehearsal = rehearse(setup, batches, learning_rate=learning_rate)
    if rehearsal.reason is not None:
        raise Infeasible(rehearsal.reason)
    return rehearsal.steps
