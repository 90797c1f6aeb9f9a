"""The choice of the split: what is saved, who decides, and what is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from autobatch import InputError, Plan
from autobatch.core.options import Options
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import Setup
from autobatch.search import curve, plan_split
from autobatch.search.plan_split import choose_split
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.split import SizeSplit
from tests.support.probes import Listener, probe_of
from tests.support.ragged import (
    Sequences,
    joined_workload,
    padded_and_real,
    ragged_workload,
    simulated_setup,
    wide_model,
)
from tests.support.training import make_loop, make_setup, tokens

PLAN = make_plan(target_batch=24, micro_batch_limit=6, learning_rate=0.01)


def chosen(setup: Setup, plan: Plan = PLAN, split: str = "auto", limit: int = 6) -> tuple[Plan, list[str]]:
    """Choose the split of a plan, and return the plan with the notes."""
    listener, options = Listener(), Options().with_values(split=split)
    process, limited = ThisProcess(setup), probe_of(limit)
    found = choose_split(process, plan, limited, options, ranks=Ranks(), batches=None, progress=listener)
    return found, listener.notes


@pytest.fixture(name="untraced")
def untraced_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step be traced, as on a GPU."""
    monkeypatch.setattr(curve, "trace_setup", lambda *_: None)


@pytest.mark.usefixtures("untraced")
def test_ragged_samples_are_split_by_size_with_the_saving_in_the_note() -> None:
    """The oracle counts the padding of the batches that will run."""
    setup = make_setup(ragged_workload())
    plan, (note,) = chosen(setup)
    cut = plan.size_cut
    assert (plan.split, cut.sizes, cut.micro_batches, cut.limits_by) == ("size", [24.0], [6], "longest")
    assert cut.padding < cut.padding_by_count
    assert f"{cut.padding:.2f} times its real size in place of {cut.padding_by_count:.2f} times" in note
    sizes = setup.worst_case.sizes()
    split = SizeSplit(sizes=sizes, cut=cut, measured_every=4)
    padded = real = steps = 0.0
    for batch in GlobalBatchSampler(samples=48, target_batch=24, seed=0, steps=8).batches():
        groups = [[batch.ids.index(i) for i in part.ids] for part in split.parts(batch, split.largest)]
        one, other = padded_and_real(sizes[batch.ids], groups)
        padded, real, steps = padded + one, real + other, steps + len(groups)
    assert cut.padding == pytest.approx(padded / real)
    assert cut.steps == pytest.approx(steps / 8)


def mean_with_padding(model, batch):
    return model(batch[0]).mean()


EQUAL = {"train_data": tokens(), "collate": None, "size_of": None}


@pytest.mark.parametrize(
    ("changes", "split", "words"),
    [
        (EQUAL, "auto", None),
        (EQUAL, "size", "one size"),
        ({"loss": mean_with_padding}, "count", None),
        ({"loss": mean_with_padding}, "auto", "padding"),
    ],
)
def test_what_cannot_be_split_by_size_is_said_where_it_matters(changes, split, words) -> None:
    plan, notes = chosen(make_setup(ragged_workload(**changes)), split=split)
    assert plan == PLAN
    assert [words in note for note in notes] == [True] * (words is not None)


@pytest.mark.parametrize(
    ("changes", "plan"),
    [({"loss": mean_with_padding}, PLAN), ({}, msgspec.structs.replace(PLAN, multiple=2))],
)
def test_a_split_by_size_that_would_be_wrong_is_refused(changes, plan) -> None:
    with pytest.raises(InputError, match=r"--split size is not possible: .* Use --split count"):
        chosen(make_setup(ragged_workload(**changes)), plan, "size")


@pytest.mark.usefixtures("untraced")
def test_auto_leaves_batches_alone_if_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_split, "LEAST_GAIN", 9.0)
    setup = make_setup(ragged_workload())
    plan, (note,) = chosen(setup)
    assert (plan, "would save" in note) == (PLAN, True)
    assert chosen(setup, split="size")[0].size_cut is not None


@pytest.mark.usefixtures("untraced")
def test_knobs_with_a_limit_of_their_own_bound_the_split() -> None:
    setup = make_setup(ragged_workload())
    plan = msgspec.structs.replace(PLAN, micro_batch=3, knobs={"optimizer": "fused"})
    assert chosen(setup, plan, limit=20)[0].size_cut.micro_batches == [3]
    assert chosen(setup, PLAN, limit=20)[0].size_cut.micro_batches == [20]


@pytest.mark.parametrize("is_padded", [True, False])
def test_a_traced_step_has_a_limit_for_each_size_at_which_real_batches_train(
    is_padded: bool, tmp_path: Path
) -> None:
    """Samples that are joined fill a micro-batch by their total size."""
    data = Sequences(samples=300, longest=40)
    workload = ragged_workload(model=wide_model, train_data=data) if is_padded else joined_workload()
    setup = simulated_setup(workload, tmp_path, "32MiB" if is_padded else "22MiB")
    plan = make_plan(target_batch=120, micro_batch_limit=30, learning_rate=0.01)
    found, (note,) = chosen(setup, plan, "size", 30)
    cut = found.size_cut
    assert (cut.limits_by, cut.replayed_batches, cut.is_padded) == ("replay", 300, is_padded)
    assert cut.micro_batches == sorted(cut.micro_batches, reverse=True)
    if is_padded:
        assert cut.micro_batches[0] > 2 * cut.micro_batches[-1]
    else:
        assert cut.steps < plan.accumulation_steps
    assert ("padded" in note) is is_padded
    split = SizeSplit(sizes=setup.worst_case.sizes(), cut=cut, measured_every=4)
    with setup.device.training() as meter:
        loop = make_loop(
            workload, target_batch=120, micro_batch=split.largest, split=split, steps=20,
            device=setup.device, meter=meter,
        )  # fmt: skip
        list(loop.run())
    assert loop.oom_recoveries == 0


@pytest.mark.usefixtures("untraced")
def test_joined_samples_whose_step_is_not_traced_are_split_by_count() -> None:
    plan, (note,) = chosen(make_setup(joined_workload()))
    assert (plan, "does not pad" in note) == (PLAN, True)
