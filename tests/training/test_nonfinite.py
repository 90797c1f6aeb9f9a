"""Search for the sample that makes a loss non-finite."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import nn

from autobatch.core.errors import NonFiniteError
from autobatch.training.nonfinite import find_nonfinite_sample
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import (
    INFO_NCE,
    Rows,
    fingerprint,
    make_loop,
    make_workload,
    mean_loss,
    network,
    points,
    weights,
)


def spoiled(samples: dict[int, float], dtype=torch.float32) -> Rows:
    data = points(24, dtype=dtype)
    for index, value in samples.items():
        data.columns[0][index, 0] = value
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_non_finite_loss_stops_the_run_before_the_step_and_names_the_sample(value, precision) -> None:
    workload = make_workload(model=lambda: network(torch.float32))
    bad = list(make_loop(workload, target_batch=6, steps=4).sampler.batches())[2].ids[4]
    workload = make_workload(model=lambda: nn.Sequential(nn.Linear(5, 3)), train_data=spoiled({bad: value}))
    loop = make_loop(workload, target_batch=6, micro_batch=4, steps=4, precision=precision)
    run = loop.run()
    next(run)
    next(run)
    before = weights(loop.train_state.model)
    random_state = torch.get_rng_state()
    with pytest.raises(
        NonFiniteError, match=rf"loss \(nan\) of step 3 .* sample {bad} alone gives a non-finite loss"
    ):
        next(run)
    assert torch.equal(weights(loop.train_state.model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert loop.batches_seen == loop.steps_applied == 2


def test_for_a_loss_over_the_whole_batch_the_sample_with_a_non_finite_row_is_named() -> None:
    """The loss of a single sample may be undefined, so its row is checked."""

    def undefined_alone(model, rows):
        return INFO_NCE.loss(model, rows) + rows.std(0).mean()

    workload = make_workload(
        model=lambda: network(torch.float32),
        train_data=spoiled({11: math.nan}),
        loss=replace(INFO_NCE, loss=undefined_alone),
    )
    loop = make_loop(workload, target_batch=24, micro_batch=5, steps=1)
    with pytest.raises(
        NonFiniteError, match=r"loss \(nan\) of step 1 .* sample 11 alone gives a non-finite row"
    ):
        next(loop.run())


@pytest.mark.parametrize("sizes", [[24], [5] * 4 + [4], [1] * 24])
@pytest.mark.parametrize("bad", [0, 11, 23])
def test_one_of_several_bad_samples_is_found_in_any_split(sizes: list[int], bad: int) -> None:
    """The other one is sample 23."""
    workload = make_workload(
        model=lambda: network(torch.float32), train_data=spoiled({bad: math.nan, 23: math.nan})
    )
    train_state = make_loop(workload).train_state
    parts = [list(range(24))[stop - size : stop] for stop, size in zip(accumulate(sizes), sizes, strict=True)]
    assert find_nonfinite_sample(workload, train_state, parts) == bad


def test_the_search_changes_neither_the_model_nor_the_random_state() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5), network(torch.float32), nn.Dropout(0.5))

    workload = make_workload(model=build, train_data=spoiled({3: math.nan}))
    train_state = make_loop(workload).train_state
    train_state.model.train()
    before, random_state = fingerprint(train_state.model), torch.get_rng_state()
    find_nonfinite_sample(workload, train_state, [list(range(12)), list(range(12, 24))])
    assert fingerprint(train_state.model) == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_without_a_bad_sample_or_with_an_error_none_is_found() -> None:
    def failing(model, batch):
        raise RuntimeError

    for loss in (mean_loss, failing):
        workload = make_workload(loss=loss)
        train_state = make_loop(workload).train_state
        assert find_nonfinite_sample(workload, train_state, [[4, 2]]) is None


def error_of_rank(place: int) -> tuple[int, str]:
    """Train a batch in which the sample at a place is not finite; return the sample and the error."""
    group = open_group()
    ids = next(iter(make_loop(make_workload(), target_batch=24, steps=1).sampler.batches())).ids
    workload = make_workload(train_data=spoiled({ids[place]: math.nan}, torch.float64))
    loop = ranked_loop(group, workload, [4, 4], target_batch=24, steps=1)
    with pytest.raises(NonFiniteError) as caught:
        next(loop.run())
    group.close()
    return ids[place], str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("place", [0, 23])
def test_all_ranks_name_the_sample_of_the_rank_that_has_it(server: RankServer, place: int) -> None:
    (bad, line), (_, other) = server.values(error_of_rank, place)
    assert line == other
    assert f"sample {bad} alone gives a non-finite loss (samples [" in line
    assert "and 16 more)" in line
