"""Out-of-memory errors at every operation of a resumed run: loading, training, validation and saving.

Each error is raised once. The run must end as the undisturbed one, or end with exit code 3 or 77 and do so
when it is resumed.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch import DoesNotFitError, RestartSmallerError
from autobatch.api.run import Run
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.run_folder import CHECKPOINTS
from benchmarks.report import Findings
from benchmarks.tiny_run import tiny_run, train, weights_of

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
EARLY = "setup and data"


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


def inject_everywhere(root: Path, *, stride: int = 1, split_check: str = "off") -> Findings:
    """Resume a run again and again, with an error at another operation each time.

    Args:
        root: an empty folder.
        stride: operations from one error to the next.
        split_check: also check that the loss can be split, as the option says.

    Returns:
        The outcomes by part of the run.
    """
    begun, folder, findings = root / "begun", root / "injected", Findings()
    expected = weights_of(train(_run(begun, resume=False)).model)
    for path in list_checkpoints(begun / CHECKPOINTS)[1:]:
        shutil.rmtree(path)
    shutil.copytree(begun, folder)
    run = _run(folder, split_check=split_check)
    with _injected(None) as counting:
        assert torch.equal(weights_of(train(run).model), expected)
    # A collection of garbage would look through all modules in each run.
    gc.freeze()
    for at in range(0, counting.count, stride):
        shutil.rmtree(folder)
        shutil.copytree(begun, folder)
        phase, found = _outcome(folder, at, expected, split_check)
        is_right = found in ("recovered", "resumed")
        findings.add(phase, found, "" if is_right else f"operation {at}: {found}")
    return findings


def _run(folder: Path, *, resume: bool = True, **options: Any) -> Run:
    return tiny_run(folder, resume=resume, validate_every=1, **options)


def _outcome(folder: Path, at: int, expected: Tensor, split_check: str) -> tuple[str, str]:
    """Resume with an error at one operation; return the part of the run, and what happened."""
    failure: BaseException | None = None
    found: Tensor | None = None
    run = _run(folder, split_check=split_check)
    with _injected(at) as injection:
        try:
            found = weights_of(train(run).model)
        except BaseException as error:
            failure = error.with_traceback(None)
    if found is not None:
        return injection.phase, "recovered" if _agree(found, expected) else "other weights"
    # Of an error before the run begins, the command makes one line and exit code 3.
    is_early = injection.phase == EARLY and isinstance(failure, torch.OutOfMemoryError)
    if not is_early and not isinstance(failure, DoesNotFitError | RestartSmallerError):
        return injection.phase, f"{type(failure).__name__}: {str(failure)[:200]}"
    found = weights_of(train(_run(folder)).model)
    return injection.phase, "resumed" if _agree(found, expected) else "other weights after a resume"


def _agree(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())


def _phase(frame: FrameType | None) -> str:
    """Return the part of the run that a frame belongs to, by its innermost known function."""
    while frame is not None:
        if "/autobatch/" in frame.f_code.co_filename and frame.f_code.co_name in PHASES:
            return PHASES[frame.f_code.co_name]
        frame = frame.f_back
    return EARLY
