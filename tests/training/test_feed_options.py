"""The options of a feed: what the user gave, else the plan, else the loader; and who keeps the workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autobatch.core.knobs import LOADER_WORKERS, PREFETCH
from autobatch.planning import make_plan
from autobatch.training.feed_options import feed_options, stream_workers
from autobatch.workload.feed import AHEAD
from autobatch.workload.loader_parts import Loading
from tests.support.options import as_options


def options_of(knobs: dict[str, Any], loading: Loading, **given: Any) -> dict[str, Any]:
    plan = msgspec.structs.replace(
        make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1), knobs=knobs
    )
    return feed_options(plan, as_options("fit", target_batch=8, **given), loading, None, print)


@pytest.mark.parametrize(
    ("knobs", "of_loader", "given", "workers", "prefetch"),
    [
        ({}, {}, {}, 0, AHEAD),
        ({}, {"workers": 3, "prefetch": 5}, {}, 3, 5),
        ({LOADER_WORKERS: 2, PREFETCH: 4}, {"workers": 3, "prefetch": 5}, {}, 2, 4),
        ({LOADER_WORKERS: 2, PREFETCH: 4}, {}, {"workers": 0, "prefetch": 1}, 0, 1),
    ],
)
def test_the_user_comes_first_then_the_plan_then_the_loader(
    knobs: dict[str, Any], of_loader: dict[str, Any], given: dict[str, Any], workers: int, prefetch: int
) -> None:
    found = options_of(knobs, Loading(**of_loader), **given)
    assert (found["workers"], found["prefetch"]) == (workers, prefetch)
    assert found["sample_seeds"] == (workers > 0), "several workers draw as one"


def test_the_workers_of_a_stream_read_it_and_make_no_micro_batches() -> None:
    loading = Loading(workers=2)
    options = options_of({}, loading)
    of_stream = stream_workers(options, loading)
    assert (of_stream["num_workers"], of_stream["prefetch_factor"]) == (2, AHEAD)
    assert (options["workers"], options["sample_seeds"]) == (0, False)
    assert stream_workers(options, loading) == {}
