"""The options of the feed of a run, and of its stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autobatch.core.knobs import LOADER_WORKERS, PREFETCH
from autobatch.core.options import Options
from autobatch.core.records.plan import Plan
from autobatch.workload.feed import AHEAD
from autobatch.workload.loader_parts import Loading
from autobatch.workload.worker import start_method


def feed_options(
    plan: Plan,
    options: Options,
    loading: Loading,
    seeded_before: bool | None,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Return the options of the feed; a run that seeded its samples keeps doing so after a resume."""
    workers = options.train.workers
    if workers is None:
        workers = int(plan.knobs.get(LOADER_WORKERS) or loading.workers or 0)
    # A split by size changes the order in which samples are fetched, which must not change their draws.
    seeded = options.train.sample_seeds or workers > 0 or plan.size_cut is not None
    if seeded and seeded_before is False:
        note(
            "the run did not seed its samples one by one before the resume, and does from here on. If the "
            "data are augmented at random, the rest differs from the uninterrupted run: use --workers 0 to "
            "continue as before"
        )
    seeded = seeded or bool(seeded_before)
    prefetch = options.train.prefetch or int(plan.knobs.get(PREFETCH) or loading.prefetch or AHEAD)
    return {"seed": options.device.seed, "workers": workers, "prefetch": prefetch, "sample_seeds": seeded}


def stream_workers(options: dict[str, Any], loading: Loading) -> dict[str, Any]:
    """Move the loader processes from the feed, which makes micro-batches, to the stream."""
    workers = options["workers"]
    options |= {"workers": 0, "sample_seeds": False}
    if not workers:
        return {}
    return {
        "num_workers": workers,
        "prefetch_factor": options["prefetch"],
        "worker_init_fn": loading.init_worker,
        "multiprocessing_context": start_method(),
    }
