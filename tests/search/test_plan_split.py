"""The choice of the split: what is saved, who decides, and what is said."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from autobatch import InputError, Loss, Plan
from autobatch.core.options import Options
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import Setup
from autobatch.search import plan_split
from autobatch.search.plan_split import choose_split
from autobatch.training.split_check import examine
from autobatch.workload.order import GlobalBatchSampler, SizeSplit, Split
from tests.support.probes import probe_of
from tests.support.ragged import (
    Sequences,
    padded_and_real,
    ragged_workload,
    simulated_setup,
    wide_model,
)
from tests.support.training import (
    INFO_NCE,
    fingerprint,
    language_model,
    make_loop,
    make_setup,
    token_loss,
    tokens,
    whole_tokens,
)

PLAN = make_plan(target_batch=24, micro_batch_limit=6, learning_rate=0.01)


def chosen(setup: Setup, plan: Plan = PLAN, split: str = "auto", limit: int = 6) -> tuple[Plan, list[str]]:
    """Choose the split of a plan, and return the plan with the notes."""
    process, options = ThisProcess(setup), Options(split=split)
    found, note = choose_split(process, plan, probe_of(limit), options, check=examine, ranks=Ranks())
    return found, [note] * bool(note)


def test_ragged_samples_are_split_by_size_with_the_saving_in_the_note() -> None:
    """The oracle counts the padding of the batches that will run."""
    setup = make_setup(ragged_workload())
    plan, (note,) = chosen(setup)
    cut, sizes = plan.size_cut, setup.worst_case.sizes()
    assert (plan.split, cut.longest, cut.micro_batch, cut.max_micro_batch) == ("size", 24.0, 6, 24)
    by_size = SizeSplit(sizes=sizes, cut=cut)
    costs = []
    for split, limit in ((Split(), 6), (by_size, by_size.largest)):
        batches = GlobalBatchSampler(samples=48, target_batch=24, seed=0, steps=3).batches()
        groups = [part.ids for batch in batches for part in split.parts(batch, limit)]
        costs.append(padded_and_real(sizes, groups)[0] + len(groups) * by_size.fixed_area(24))
    assert f"about {1 - costs[1] / costs[0]:.0%} less to compute" in note


def random_loss(model, batch):
    found = token_loss(model, batch)
    return Loss(found.total * torch.rand(()), found.count)


WRONG = {
    "BatchNorm": ragged_workload(
        model=lambda: nn.Sequential(language_model(), nn.BatchNorm1d(7)),
        loss=lambda model, batch: model(batch[0]).mean(),
    ),
    "a mean over tokens": ragged_workload(loss=whole_tokens),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_split_by_size_that_would_change_results_is_not_made(name: str) -> None:
    setup = make_setup(WRONG[name])
    before, drawn = fingerprint(setup.model), torch.get_rng_state()
    assert chosen(setup)[0] == PLAN
    assert fingerprint(setup.model) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    with pytest.raises(InputError, match=r"--split size is not possible: .* Use --split count"):
        chosen(setup, split="size")


def test_a_loss_that_draws_has_the_doubt() -> None:
    assert chosen(make_setup(ragged_workload(loss=random_loss)))[0].size_cut is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_data": tokens(), "collate": None, "size_of": None}, None),
        ({"loss": lambda model, batch: 1 / 0}, "ZeroDivisionError"),
        ({"loss": INFO_NCE}, "WholeBatchLoss"),
    ],
)
def test_what_gains_nothing_or_raises_is_split_by_count_with_a_note(changes, words) -> None:
    plan, notes = chosen(make_setup(ragged_workload(**changes)))
    assert plan == PLAN
    assert [words in note for note in notes] == [True] * (words is not None)


def test_auto_leaves_batches_alone_if_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_split, "LEAST_SAVED", 0.9)
    setup = make_setup(ragged_workload())
    plan, (note,) = chosen(setup)
    assert (plan, "would save" in note) == (PLAN, True)
    assert chosen(setup, split="size")[0].size_cut is not None
    assert chosen(setup, split="count") == (PLAN, [])
    with pytest.raises(InputError, match="multiples of 2"):
        chosen(setup, msgspec.structs.replace(PLAN, multiple=2), "size")


def test_a_cut_is_lowered_until_batches_of_the_run_train_at_it() -> None:
    data = Sequences(samples=300, longest=40)
    workload = ragged_workload(model=wide_model, train_data=data)
    setup = simulated_setup(workload, "20MiB")
    plan = make_plan(target_batch=120, micro_batch_limit=20, learning_rate=0.01)
    cut = chosen(setup, plan, "size", 20)[0].size_cut
    assert 8 < cut.micro_batch < 20, "12 of the longest fit"
    split = SizeSplit(sizes=setup.worst_case.sizes(), cut=cut)
    with setup.device.session(is_probe=False) as meter:
        loop = make_loop(
            workload, target_batch=120, micro_batch=split.largest, split=split, steps=6,
            device=setup.device, meter=meter,
        )  # fmt: skip
        list(loop.run())
    assert loop.oom_recoveries == 0
