"""The choice of the split: what is saved, who decides, and what is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from autobatch import InputError
from autobatch.planning import make_plan
from autobatch.search import curve, plan_split, real_batches
from autobatch.search.plan_split import SplitSettings, choose_split, read_sizes, with_expectations
from autobatch.setup.session import Session
from autobatch.workload.split import SizeSplit
from tests.support.ragged import (
    Sequences,
    joined_workload,
    padded_and_real,
    ragged_split,
    ragged_workload,
    simulated_setup,
    wide_model,
)
from tests.support.training import make_loop, make_setup, tokens

PLAN = make_plan(target_batch=24, micro_batch_limit=6, learning_rate=0.01)


def settings(split: str = "auto", limit: int = 6) -> SplitSettings:
    return SplitSettings(split=split, limit=limit, cap=24, seed=0)


@pytest.fixture(name="untraced")
def untraced_steps(monkeypatch) -> None:
    """Let no step be traced, as on a GPU."""
    monkeypatch.setattr(curve, "trace_setup", lambda *_: None)


@pytest.mark.usefixtures("untraced")
def test_ragged_samples_are_split_by_size_with_the_saving_in_the_note() -> None:
    session = Session(make_setup(ragged_workload()))
    cut, note = choose_split(session, PLAN, settings())
    assert cut is not None
    assert cut.padding < cut.padding_by_count
    assert (cut.sizes, cut.micro_batches, cut.limits_by) == ([24.0], [6], "longest")
    assert f"{cut.padding_by_count:.2f} → {cut.padding:.2f}" in note
    assert read_sizes(session).tolist() == [len(Sequences()[i][0]) for i in range(48)]


def test_equal_samples_are_split_by_count_without_a_word_unless_asked() -> None:
    session = Session(make_setup(ragged_workload(train_data=tokens(), collate=None, size_of=None)))
    assert choose_split(session, PLAN, settings()) == (None, None)
    cut, note = choose_split(session, PLAN, settings("size"))
    assert cut is None
    assert "one size" in note


def test_count_asks_nothing(monkeypatch) -> None:
    monkeypatch.setattr(plan_split, "find_obstacle", lambda _: pytest.fail("asked"))
    assert choose_split(Session(make_setup(ragged_workload())), PLAN, settings("count")) == (None, None)


def test_a_hazard_is_a_note_for_auto_and_an_error_for_size() -> None:
    def mean(model, batch):
        return model(batch[0]).mean()

    session = Session(make_setup(ragged_workload(loss=mean)))
    cut, note = choose_split(session, PLAN, settings())
    assert cut is None
    assert "padding" in note
    with pytest.raises(InputError, match=r"--split size is not possible: .* Use --split count"):
        choose_split(session, PLAN, settings("size"))


@pytest.mark.usefixtures("untraced")
def test_auto_leaves_batches_alone_if_nothing_is_saved(monkeypatch) -> None:
    monkeypatch.setattr(plan_split, "LEAST_GAIN", 9.0)
    session = Session(make_setup(ragged_workload()))
    cut, note = choose_split(session, PLAN, settings())
    assert cut is None
    assert "would save" in note
    assert choose_split(session, PLAN, settings("size")).cut is not None


def test_expectations_are_means_over_the_batches_that_will_run() -> None:
    workload = ragged_workload()
    split = ragged_split(workload)
    cut, gain = with_expectations(split.cut, split.sizes, PLAN, seed=3)
    assert gain > 1.2
    sampler = plan_split.GlobalBatchSampler(samples=48, target_batch=24, seed=3, steps=plan_split.BATCHES)
    padded = real = 0.0
    steps = []
    for batch in sampler.batches():
        parts = SizeSplit(sizes=split.sizes, cut=split.cut, measured_every=4).parts(batch, split.largest)
        steps.append(len(parts))
        groups = [[batch.ids.index(i) for i in part.ids] for part in parts]
        one, other = padded_and_real(split.sizes[batch.ids], groups)
        padded, real = padded + one, real + other
    assert cut.padding == pytest.approx(padded / real)
    assert cut.steps == pytest.approx(sum(steps) / len(steps))


@pytest.mark.usefixtures("untraced")
def test_knobs_with_a_limit_of_their_own_bound_the_split() -> None:
    session = Session(make_setup(ragged_workload()))
    plan = msgspec.structs.replace(PLAN, micro_batch=3, knobs={"optimizer": "fused"})
    assert choose_split(session, plan, settings(limit=20)).cut.micro_batches == [3]
    assert choose_split(session, PLAN, settings(limit=20)).cut.micro_batches == [20]


def test_a_step_that_is_traced_has_a_limit_for_each_size_which_real_batches_survive(tmp_path: Path) -> None:
    workload = ragged_workload(model=wide_model, train_data=Sequences(samples=300, longest=40))
    setup = simulated_setup(workload, tmp_path, "32MiB")
    plan = make_plan(target_batch=120, micro_batch_limit=30, learning_rate=0.01)
    cut = choose_split(Session(setup), plan, settings(limit=30)._replace(cap=120)).cut
    assert cut.limits_by == "replay"
    assert cut.replayed_batches == real_batches.REPLAYED
    assert cut.micro_batches == sorted(cut.micro_batches, reverse=True)
    assert cut.micro_batches[0] > 2 * cut.micro_batches[-1]
    split = SizeSplit(sizes=setup.worst_case.sizes(), cut=cut, measured_every=4)
    with setup.device.training() as meter:
        loop = make_loop(
            workload, target_batch=120, micro_batch=split.largest, split=split, steps=20,
            device=setup.device, meter=meter,
        )  # fmt: skip
        list(loop.run())
    assert loop.oom_recoveries == 0


def test_joined_samples_fill_a_micro_batch_by_their_total_size(tmp_path: Path) -> None:
    setup = simulated_setup(joined_workload(), tmp_path, "22MiB")
    plan = make_plan(target_batch=120, micro_batch_limit=30, learning_rate=0.01)
    cut, note = choose_split(Session(setup), plan, settings("size", 30)._replace(cap=120))
    assert not cut.is_padded
    assert cut.steps < plan.accumulation_steps
    assert "padded" not in note
    split = SizeSplit(sizes=setup.worst_case.sizes(), cut=cut, measured_every=4)
    with setup.device.training() as meter:
        loop = make_loop(
            setup.workload, target_batch=120, micro_batch=split.largest, split=split, steps=20,
            device=setup.device, meter=meter,
        )  # fmt: skip
        records = list(loop.run())
    assert loop.oom_recoveries == 0
    assert max(record.accumulation_steps for record in records) <= plan.accumulation_steps


@pytest.mark.usefixtures("untraced")
def test_joined_samples_whose_step_is_not_traced_are_split_by_count() -> None:
    cut, note = choose_split(Session(make_setup(joined_workload())), PLAN, settings())
    assert cut is None
    assert "does not pad" in note
