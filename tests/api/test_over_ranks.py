"""What ranks refuse together; `tests/scenarios/test_ranks.py` has whole runs."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from autobatch.api.ranks import (
    WholeModelTooLargeError,
    agree_on_fit,
    check_count,
    claim_of_ranks,
    continued,
    options_of_rank,
)
from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.distributed.ranks import Ranks
from autobatch.training.run_folder import CHECKPOINTS
from tests.support.options import as_options


class Two(Ranks):
    """The first of two ranks; the other gives what the first does, but for what is changed."""

    world = 2

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def gather(self, value: Any) -> list[Any]:
        other = {**value, **self.changes} if isinstance(value, dict) else value
        return [value, other]


OPTIONS = as_options("fit", target_batch=8)


def test_one_process_keeps_its_options() -> None:
    assert options_of_rank(OPTIONS, Ranks()) is OPTIONS
    assert continued(OPTIONS, Ranks()) is OPTIONS
    check_count(a_fit(ranks=1), Ranks())
    check_count(a_fit(ranks=2), Two())


def a_fit(**changes: Any) -> Options:
    return as_options("fit", target_batch=8, **changes)


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        (lambda: check_count(a_fit(ranks=2), Ranks()), "use the command with --ranks 2, or start the script"),
        (lambda: check_count(a_fit(ranks=3), Two()), "--ranks is 3, and torchrun started 2: leave out"),
        (lambda: options_of_rank(OPTIONS, Two(**{"--seed": 1})), "--seed: rank 1 has 1, and rank 0 has 0"),
        (lambda: options_of_rank(OPTIONS, Two(torch="2.0")), "differ in torch: rank 1 has 2.0"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(refuse: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        refuse()


def test_a_restart_continues_in_its_folder(tmp_path: Path) -> None:
    ranks = Two()
    ranks.restart, ranks.earlier_out = 1, tmp_path
    options = continued(OPTIONS, ranks)
    assert (options.train.out, options.train.resume) == (str(tmp_path), False)
    (tmp_path / CHECKPOINTS / "step-00000001").mkdir(parents=True)
    assert continued(OPTIONS, ranks).train.resume


def test_a_folder_that_a_rank_does_not_see_is_refused(tmp_path: Path) -> None:
    class Blind(Two):
        def gather(self, value: Any) -> list[Any]:
            return [[True, "a"], [False, "b"]]

    entered: list[Path] = []
    with ExitStack() as held, pytest.raises(InputError, match="rank 1 on b does not see the folder"):
        claim_of_ranks(lambda: tmp_path, Blind(), entered.append, held)
    with ExitStack() as held:
        out = claim_of_ranks(lambda: tmp_path, Ranks(), entered.append, held)
    assert entered == [out] == [tmp_path]
    assert list(tmp_path.iterdir()) == []


class OtherFails(Two):
    """The first of two ranks; on the other a probe fails."""

    def gather(self, value: Any) -> list[Any]:
        return [value, "a micro-batch of 1 does not fit in 4 GiB"]


def test_ranks_share_a_model_if_it_is_too_large_for_one_of_them() -> None:
    def fails() -> int:
        raise DoesNotFitError("a micro-batch of 1 does not fit in 2 GiB: no memory. What helps: more")

    assert agree_on_fit(lambda: 5, Two()) == 5
    with pytest.raises(WholeModelTooLargeError, match=r"fits on rank 0, .*: a micro-batch .* no memory$"):
        agree_on_fit(fails, Two())
    with pytest.raises(WholeModelTooLargeError, match=r"fits on rank 1, .*: a micro-batch .* 4 GiB$"):
        agree_on_fit(lambda: 5, OtherFails())
