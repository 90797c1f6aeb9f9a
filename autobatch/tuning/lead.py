"""Calls that rank 0 asks for and all ranks make at the same time, until it tells them an answer.

    rank 0: ask ──► every rank: run ──► rank 0: what was found on each

Everything that is asked, found and answered is what JSON can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autobatch.distributed.ranks import Ranks
from autobatch.setup.child import ChildCrashed

OTHER_ENDED = "another rank has ended"
"""Failure of a rank that only waited for another."""
_END = "end"

Run = Callable[[str, Any], Any]
"""Function that does an act of a name with what was asked, on one rank."""


def ask(ranks: Ranks, run: Run, act: str, asked: Any) -> list[Any]:
    """Let all ranks do an act, and return what was found on each; rank 0 calls it."""
    ranks.gather([act, asked])
    return ranks.gather(run(act, asked))


def follow(ranks: Ranks, run: Run) -> Any:
    """Do what rank 0 asks for until it answers, and return its answer; all other ranks call it."""
    while True:
        act, asked = ranks.gather(None)[0]
        if act == _END:
            return asked
        ranks.gather(run(act, asked))


def answer(ranks: Ranks, found: Any) -> None:
    """Tell the other ranks the answer; rank 0 calls it."""
    ranks.gather([_END, found])


def reason_of(crash: ChildCrashed) -> str:
    """Return why the child of a rank ended."""
    return OTHER_ENDED if crash.after_other else str(crash)


def failed_rank(failures: Sequence[str | None]) -> int | None:
    """Return the rank that failed, with a reason of its own if there is one; None if none failed."""
    failed = [rank for rank, failure in enumerate(failures) if failure is not None]
    return next((rank for rank in failed if failures[rank] != OTHER_ENDED), failed[0] if failed else None)
