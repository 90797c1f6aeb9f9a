"""The loop of a study.

ask ──► run ──► tell ──► … until the budget is used up
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autobatch.tuning.configuration import ResultT
    from autobatch.tuning.study import OptunaStudy, TrialRequest


def run_study(
    study: OptunaStudy[ResultT],
    run: Callable[[TrialRequest[ResultT]], ResultT],
    *,
    trials: int,
    is_expired: Callable[[], bool],
    on_trial: Callable[[TrialRequest[ResultT], ResultT], None],
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Run trials until the budget is used up or every point is tried.

    Args:
        study: chooses the trials and stores their results.
        run: runs a trial; not called for a point whose result is known.
        trials: number of trials, including those of earlier runs and of other processes.
        is_expired: asked before every trial.
        on_trial: called after every trial.
        clock: seconds.

    Returns:
        Seconds spent on choosing trials and on storing them.

    Raises:
        InputError: the storage failed.
        Exception: whatever ``run`` raises; its trial is closed.
    """
    seconds = 0.0
    while study.num_taken() < trials and not is_expired():
        start = clock()
        request = study.ask()
        seconds += clock() - start
        if request is None:
            break
        try:
            result = run(request) if request.known is None else request.known
        except BaseException:
            study.abandon(request)
            raise
        start = clock()
        study.tell(request, result)
        seconds += clock() - start
        on_trial(request, result)
    return seconds
