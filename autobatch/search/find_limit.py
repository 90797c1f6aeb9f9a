"""The largest micro-batch that fits: a search finds it, saves it, and begins at what was saved before.

saved limit ──guess──► search by runs ──► batches of the plan ──► Limit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from autobatch.core.errors import DoesNotFitError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import LimitedBy, Probe
from autobatch.core.units import format_bytes
from autobatch.footprint.explain import explain
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.rehearsal import Outcome
from autobatch.rehearsal.setup import KeyValue
from autobatch.search.plan_limit import limit_of_plan
from autobatch.search.probe import FIRST, Limit, find_largest
from autobatch.search.runs import run_attempt
from autobatch.search.saved import SavedLimit, keep, recall

STATE_COPIES = 4
"""Weights, gradients, and two states of each weight, as Adam has them."""


def find_limit(
    process: SetupProcess, options: Options, *, share: int | None = None, home: Path, progress: Progress
) -> Limit:
    """Find the largest micro-batch that fits, or check the one that was asked for.

    Args:
        process: holds the setup.
        options: options of the run: the micro-batch that was asked for, or the caps.
        share: samples of a batch that this rank takes, whose micro-batches are checked; None without a plan.
        home: data directory, in which answers are saved.
        progress: receives each attempt and the answer.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
    """
    info, asked = process.info, options.micro_batch
    progress.opened(info.device)
    for line in info.notes:
        progress.note(line)
    progress.doing("looking for what fits")
    if asked is None:
        limit = _largest(process, options, share, home, progress)
    else:
        outcome = run_attempt(process, asked, progress)
        if not outcome.attempt.fits:
            raise outcome.error or nothing_fits(process, outcome)
        probe = Probe(
            micro_batch=asked,
            limited_by="max_micro_batch",
            upper_bound_by="cap",
            predicted_micro_batch=None,
            oom_count=0,
            attempts=[outcome.attempt],
            source="asked",
        )
        limit = Limit(probe, trace=outcome.trace)
    probe = msgspec.structs.replace(limit.probe, precision=options.precision)
    limit = limit._replace(probe=probe, planned=probe.micro_batch)
    return limit if share is None else limit_of_plan(process, limit, share, options.seed, progress)


def _largest(
    process: SetupProcess, options: Options, share: int | None, home: Path, progress: Progress
) -> Limit:
    """Find the largest micro-batch that fits; see `find_limit`."""
    info = process.info
    caps: dict[LimitedBy, int | None] = {
        "target_batch": options.target_batch if share is None else share,
        "max_micro_batch": options.max_micro_batch,
        "dataset": info.samples,
    }
    outcomes: dict[int, Outcome] = {}

    def run(size: int) -> Outcome:
        outcomes[size] = outcome = run_attempt(process, size, progress)
        return outcome

    # An error of a large model costs a whole run.
    is_large = STATE_COPIES * info.model_bytes > info.device.budget_bytes / 2
    search = partial(
        find_largest,
        run,
        caps,
        partial(info.new_allocator, info.device.budget_bytes),
        multiple=options.micro_batch_multiple,
        first=FIRST // 2 if is_large else FIRST,
    )
    limit = search_from_saved(search, info.key, home, progress)
    if not limit.probe.micro_batch:
        raise nothing_fits(process, outcomes[min(outcomes)])
    return limit


def search_from_saved(
    search: Callable[..., Limit], key: Mapping[str, KeyValue], home: Path, progress: Progress
) -> Limit:
    """Search from the saved limit of a key, note what refused sizes besides the budget, and save the answer.

    ``search`` is `find_largest` without ``known``. Nothing is saved if nothing fits.
    """
    known = recall(key, home)
    limit = search(known=known)
    probe = limit.probe
    if not probe.micro_batch:
        return limit
    if known is not None and not probe.attempts[0].fits:
        progress.note(f"{probe.attempts[0].micro_batch} no longer fit, so the saved limit was probed again")
    size = probe.micro_batch + probe.multiple
    above = next((attempt for attempt in probe.attempts if attempt.micro_batch == size), None)
    if above is not None and above.is_error:
        progress.note(
            f"a micro-batch of {size:,} does not run: {above.reason}. If only multiples of a number run, "
            "such as 2, give --micro-batch-multiple 2"
        )
    held = min((attempt.micro_batch for attempt in probe.attempts if attempt.is_below_budget), default=None)
    if held is None:
        answer = SavedLimit(micro_batch=probe.micro_batch, programs=tuple(limit.programs))
        return limit._replace(file=keep(answer, key, home, progress))
    progress.note(
        f"{key['device']}, not the budget, refused a micro-batch of {held:,} twice. Others may hold its "
        "memory, so the limit is not saved: free memory, or give a smaller --memory-budget"
    )
    return limit


def nothing_fits(process: SetupProcess, smallest: Outcome) -> DoesNotFitError:
    """Build the error that explains the memory of the smallest attempt, and lists what helps."""
    last, largest = smallest.attempt, process.info.largest_sample
    parts = [
        f"a micro-batch of {last.micro_batch} does not fit in the budget of "
        f"{format_bytes(process.info.device.budget_bytes)}: {str(last.reason).removesuffix('.')}"
        + (f" (in the {last.phase})" if last.phase else "")
    ]
    if largest is not None and last.micro_batch == 1:
        index, size = largest
        parts.append(f"It ran with sample {index} of the training data, the largest: its size is {size:g}")
    if smallest.trace is not None and smallest.trace.marks:
        parts.append(f"It took {explain(smallest.trace).text()}")
    # The memory of a loss over the whole batch depends on the target batch, not on the micro-batch.
    smaller = ", a smaller target batch" if last.phase == "loss" else ""
    shorter = ", samples cut shorter or left out" if largest is not None else ""
    parts.append(f"What helps: a larger --memory-budget{smaller}{shorter}")
    return DoesNotFitError(". ".join(parts))
