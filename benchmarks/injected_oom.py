"""Out-of-memory errors at every operation of a resumed run: loading, training, validation and saving.

Each error is raised once. The run must end as the undisturbed one, or end with exit code 3 or 77 and do so
when it is resumed.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch import DoesNotFitError, RestartSmallerError
from benchmarks.tiny_run import tiny_workload, trained_run, weights_of

STEPS, CHECKPOINT = 3, 1
TOLERANCE = 1e-9
"""Relative error of weights in float64 after other micro-batches."""
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."
PHASES = {
    "load_newest": "loading",
    "restore_loop": "loading",
    "_save": "saving",
    "export_weights": "saving",
    "validate": "validation",
    "sanity_check_validation": "validation",
    "finish": "optimizer step",
    "accumulate": "forward and backward",
    "check_loss_splits": "check of the split",
    "_look": "check of the split",
}
"""Functions of autobatch, and the part of a run that they are."""


class _Injection(TorchDispatchMode):
    """Raises an error at one operation; counts all of them."""

    def __init__(self, at: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at = at
        self.count = 0
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operation()
        return func(*args, **(kwargs or {}))

    def operation(self) -> None:
        """Count an operation, and raise if it is the one.

        Raises:
            torch.OutOfMemoryError: it is.
        """
        self.count += 1
        if self.count - 1 == self._at:
            self.phase = _phase(sys._getframe())
            raise torch.OutOfMemoryError(MESSAGE)

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is an operation too."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.operation()
            return function(*args, **kwargs)

        return call


@contextmanager
def _injected(at: int | None) -> Iterator[_Injection]:
    injection = _Injection(at)
    with ExitStack() as held:
        # Files are read and written without operators of torch.
        for name in ("save", "load"):
            held.enter_context(mock.patch.object(torch, name, injection.wrapped(getattr(torch, name))))
        held.enter_context(injection)
        yield injection


def inject_everywhere(
    root: Path, *, stride: int = 1, split_check: str = "off"
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Resume a run again and again, with an error at another operation each time.

    Args:
        root: an empty folder.
        stride: operations from one error to the next.
        split_check: also check that the loss can be split, as the option says.

    Returns:
        Counts of the outcomes by part of the run, and what went wrong.
    """
    begun = root / "begun"
    expected = _begin(begun)
    straight = root / "straight"
    shutil.copytree(begun, straight)
    workload = tiny_workload()
    with _injected(None) as counting:
        model = trained_run(straight, steps=STEPS, workload=workload, resume=True, split_check=split_check)
    assert torch.equal(weights_of(model), expected)
    counts: dict[str, Counter[str]] = {}
    faults: list[str] = []
    # A collection of garbage would look through all modules in each run.
    gc.freeze()
    for at in range(0, counting.count, stride):
        folder = root / "injected"
        shutil.copytree(begun, folder)
        phase, found = _outcome(folder, at, expected, split_check)
        counts.setdefault(phase, Counter())[found] += 1
        if found not in ("recovered", "resumed"):
            faults.append(f"operation {at} ({phase}): {found}")
        shutil.rmtree(folder)
    return counts, faults


def _begin(folder: Path) -> Tensor:
    """Write a run of which only the first checkpoint is left; return the weights at its end."""
    expected = weights_of(trained_run(folder, steps=STEPS, workload=tiny_workload()))
    for step in range(CHECKPOINT + 1, STEPS + 1):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    return expected


def _outcome(folder: Path, at: int, expected: Tensor, split_check: str) -> tuple[str, str]:
    """Resume with an error at one operation; return the part of the run, and what happened."""
    failure: BaseException | None = None
    model, workload = None, tiny_workload()
    with _injected(at) as injection:
        try:
            model = trained_run(folder, steps=STEPS, workload=workload, resume=True, split_check=split_check)
        except BaseException as error:
            failure = error.with_traceback(None)
    if model is not None:
        return injection.phase, "recovered" if _agree(model, expected) else "other weights"
    if not isinstance(failure, DoesNotFitError | RestartSmallerError):
        return injection.phase, f"{type(failure).__name__}: {str(failure)[:200]}"
    model = trained_run(folder, steps=STEPS, workload=tiny_workload(), resume=True)
    return injection.phase, "resumed" if _agree(model, expected) else "other weights after a resume"


def _agree(model: nn.Module, expected: Tensor) -> bool:
    return bool((weights_of(model) - expected).norm() <= TOLERANCE * expected.norm())


def _phase(frame: FrameType | None) -> str:
    """Return the part of the run that a frame belongs to, by its innermost known function."""
    while frame is not None:
        if "/autobatch/" in frame.f_code.co_filename and frame.f_code.co_name in PHASES:
            return PHASES[frame.f_code.co_name]
        frame = frame.f_back
    return "setup and data"
