"""Trials: the micro-batch that a configuration allows, and its speed.

    configuration ──► largest micro-batch ──► seconds per step

An error makes a configuration infeasible, also memory that runs out, or a child process that crashes. With
every knob at its default, an error of the workload is its own and is raised.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from autobatch.core.errors import Infeasible
from autobatch.core.knobs import (
    COMPILE,
    LOADER_WORKERS,
    SPLIT,
    Configuration,
    Value,
    memory_signature,
)
from autobatch.device.oom import first_line
from autobatch.planning import micro_batches
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.process import ChildCrashed, SetupProcess
from autobatch.rehearsal.rehearsal import Batch, batch_of, rehearse
from autobatch.rehearsal.setup import Setup, with_knobs
from autobatch.search.probe import find_largest
from autobatch.step.whole_batch import batch_samples
from autobatch.tuning.compare import Measurement
from autobatch.tuning.space import changes
from autobatch.workload.contract import Workload
from autobatch.workload.feed import AHEAD, open_feed
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.split import Split

ROUND_SECONDS = 0.1
"""Approximate time that a configuration is timed for in each round of a comparison."""
LEAST_STEPS = 2
"""Steps that are timed, however long they take."""
ACCUMULATED = 2
"""Micro-batches of a timed step: like most of a step, the second one adds to existing gradients."""
FED = 8
"""Micro-batches of a timed step that workers feed: they fetch during the optimizer step too, and its share of
their time must be small."""
COMPILED_STEPS = 2
"""Warm-up steps of each size with a compiled model: the second size makes it compile again, for all sizes."""
JUDGED_STEPS = 2
"""First steps of a trial, whose losses must be finite."""
ENDLESS = 2**62
"""Steps of batches that are drawn until they have taken long enough."""
Key = tuple[tuple[str, Value], ...]
"""Some values of a configuration in hashable form."""


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Trials in the process that holds the setup, with what later trials reuse of earlier ones."""

    process: SetupProcess
    limit: int
    """The largest micro-batch that fits with every knob at its default."""
    cap: int
    """The largest micro-batch that any configuration may use."""
    samples: int
    """Samples of an optimizer step on one rank."""
    multiple: int = 1
    """Number whose multiples all micro-batches are."""
    planned_steps: int
    """Optimizer steps over which the time of compiling is spread."""
    seconds: float = ROUND_SECONDS
    workers: int | None = None
    """Loader workers that were asked for; None if none were."""
    defaults: Configuration = field(default_factory=dict)
    """Values that change nothing. A knob that is missing is at its default."""
    _limits: dict[Key, int] = field(default_factory=dict)
    _compiling_s: dict[Key, float] = field(default_factory=dict)

    def measure(self, values: Configuration) -> Measurement:
        """Time the steps of a configuration.

        Raises:
            Infeasible: the configuration must not be chosen.
            Exception: whatever the workload raises with every knob at its default, except out of memory.
        """
        sizes = micro_batches(self.samples, self.micro_batch(values), self.multiple)
        knobs = {LOADER_WORKERS: self.workers, **values}
        seconds, compiling = self._call("a trial", time_steps, knobs, sizes, self.seconds)
        # A configuration that is measured again reuses compiled code.
        compiling = self._compiling_s.setdefault(_key(values), compiling)
        return Measurement(self.samples / (seconds + compiling / self.planned_steps), sizes[0])

    def confirm(self, values: Configuration) -> int:
        """Run a configuration within the enforced budget, and return its micro-batch.

        Raises:
            Infeasible: it does not fit.
        """
        size = self.micro_batch(values)
        ran = self._call("the check of the best trial", attempt, values, size).attempt
        if not ran.fits:
            raise Infeasible(ran.reason)
        return size

    def micro_batch(self, values: Configuration) -> int:
        """Return the micro-batch of a configuration: the even split at its limit, halved as it says.

        Raises:
            Infeasible: not even a micro-batch of 1 fits.
        """
        limit = self.limit_of(self.changes(memory_signature(values)))
        if not limit:
            raise Infeasible("not even a micro-batch of 1 fits")
        size = micro_batches(self.samples, limit, self.multiple)[0]
        return self.multiple * max(1, size // self.multiple >> int(values.get(SPLIT) or 0))

    def limit_of(self, changed: Configuration) -> int:
        """Return the largest micro-batch that fits with some knobs changed; 0 if none does.

        What fits without the compiler bounds a compiled configuration, because each size compiles anew.
        """
        if not changed:
            return self.limit
        key, cap, guess = _key(changed), self.cap, self.limit
        if COMPILE in changed:
            cap = guess = self.limit_of({name: changed[name] for name in changed if name != COMPILE})
        if key not in self._limits:
            search = (largest_of, changed, cap, guess, self.multiple)
            self._limits[key] = self._call("a search", *search) if cap else 0
        return self._limits[key]

    def changes(self, values: Configuration) -> dict[str, Value]:
        """Return the values that are not at their default, except the split."""
        return {name: value for name, value in changes(values, self.defaults).items() if name != SPLIT}

    def _call(self, act: str, function: Callable[..., Any], values: Configuration, *args: Any) -> Any:
        return call_with(self.process, act, function, values, not self.changes(values), *args)


def call_with(
    process: SetupProcess,
    act: str,
    function: Callable[..., Any],
    values: Configuration,
    is_own: bool,
    *args: Any,
) -> Any:
    """Call a function with the setup of a configuration in the process that holds the setup.

    Raises:
        Infeasible: the function raised it or another error, or crashed the process.
        Exception: whatever the function raises, if an error is the workload's own.
    """
    try:
        return process.call(act, _with_knobs, function, dict(values), *args)
    except Infeasible:
        raise
    except Exception as error:
        if is_own and not isinstance(error, ChildCrashed):
            raise
        reason = first_line(error)
    # Outside the except block, nothing keeps the failed step's tensors alive.
    raise Infeasible(reason)


def _with_knobs(setup: Setup, function: Callable[..., Any], values: Configuration, *args: Any) -> Any:
    return function(with_knobs(setup, values), *args)


def _key(values: Configuration) -> Key:
    return tuple(sorted(values.items()))


def largest_of(setup: Setup, cap: int, guess: int, multiple: int) -> int:
    """Return the largest micro-batch up to a cap that runs within the enforced budget; 0 if none does."""
    return find_largest(
        partial(attempt, setup),
        cap=cap,
        new_allocator=setup.device.new_allocator,
        multiple=multiple,
        guess=guess,
    ).micro_batch


def time_steps(setup: Setup, sizes: list[int], seconds: float) -> tuple[float, float]:
    """Return the seconds of an optimizer step in these micro-batches, and those of compiling once.

    Micro-batches and what comes once per step are timed apart, on temporary weights.

    Args:
        setup: the model, the data and the configuration.
        sizes: micro-batches of the target batch, the largest first.
        seconds: approximate time to measure for.

    Raises:
        Infeasible: the configuration runs out of memory, or its loss is not finite.
        Exception: whatever running the configuration raises.
    """
    workers, size = int(setup.knobs.get(LOADER_WORKERS) or 0), sizes[0]
    in_a_step = min(FED if workers else ACCUMULATED, len(sizes))
    is_compiled = setup.knobs.get(COMPILE, "off") != "off"
    warm = sorted(set(sizes), reverse=True) * COMPILED_STEPS if is_compiled else []
    # The first steps use up what workers have fetched in advance.
    ahead = 1 + math.ceil(workers * AHEAD / in_a_step)
    least = max(LEAST_STEPS, 2 * workers // in_a_step)

    def timed() -> Generator[Batch, None, None]:
        drawn = draw(setup.workload, size * in_a_step)
        device = setup.device.torch_device
        with open_feed(setup.workload, drawn, workers=workers, device=device) as feed:
            start = setup.clock()
            for batch in drawn.batches():
                if batch.index == ahead:
                    start = setup.clock()
                if batch.index >= ahead + least and setup.clock() - start >= seconds:
                    return
                collated = ((micro, size) for micro in feed.collated(batch, size))
                yield Batch(collated, in_a_step, batch_samples(setup.whole_batch, size, in_a_step))

    compiled = (
        batch_of(setup.workload, Split().parts(batch, size))
        for size in warm
        for batch in draw(setup.workload, size, steps=1).batches()
    )
    with closing(timed()) as batches:
        rehearsal = rehearse(setup, chain(compiled, batches))
    if rehearsal.failure is not None:
        raise Infeasible(rehearsal.failure.reason)
    steps = rehearsal.steps
    # Later steps may diverge with any configuration, because the batch is not the target batch.
    if any(step.result.count and not math.isfinite(step.result.loss) for step in steps[:JUDGED_STEPS]):
        raise Infeasible("its loss is not finite")
    first, measured = steps[: len(warm)], steps[len(warm) + ahead :]
    # Workers finish several micro-batches at once, so that only a mean over many counts.
    middle = statistics.fmean if workers else statistics.median
    micro = middle(step.micro_seconds for step in measured)
    once = middle(step.once_seconds for step in measured)
    compiling = sum(step.seconds - micro - once for step in first)
    return micro * len(sizes) + once, max(0.0, compiling)


def draw(workload: Workload, size: int, seed: int = 0, steps: int = ENDLESS) -> GlobalBatchSampler:
    """Return batches of a workload in its order, as a run with this seed draws them."""
    samples, order = epoch_of(workload, seed)
    return GlobalBatchSampler(samples=samples, target_batch=size, seed=seed, steps=steps, order=order)
