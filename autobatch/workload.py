"""What the user hands over, and how it is found.

A `Workload` names functions and data; nothing is built or touched until a part of autobatch needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from autobatch.errors import AutobatchError, InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

Batch: TypeAlias = Any
"""What the workload's collate makes of a list of samples."""

DEMO = "autobatch.demo:workload"


class Loss(NamedTuple):
    """A loss whose mean is over something else than samples: tokens that count, masked pixels, weights."""

    total: Tensor
    """0-d: the **sum** of the loss over what is counted."""
    count: int | float | Tensor  # type: ignore[assignment]
    """How many items ``total`` sums over; a 0-d tensor may stay on the device."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and its loss."""

    model: Callable[[], nn.Module]
    """Builds the model."""
    train_data: Dataset[Any]
    """Map-style: has ``__getitem__`` and ``__len__``."""
    loss: Callable[[nn.Module, Batch], Tensor | Loss]
    """The mean over the samples of the batch (a 0-d tensor), or a `Loss`."""
    optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    """``(parameters, learning_rate)`` to an optimizer."""
    learning_rate: float
    base_batch: int | None = None
    """The batch that ``learning_rate`` was tuned for; ``None``: unknown."""
    validation_data: Dataset[Any] | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    """Joins samples to a batch; ``None``: torch's default."""
    schedule: Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler] | None = None
    """``(optimizer, optimizer steps of the run)`` to a schedule, stepped once an optimizer step."""
    metrics: Callable[[nn.Module, Batch], Mapping[str, Tensor | Loss]] | None = None
    """More figures for validation, each like a loss: a mean over samples, or a `Loss`."""
    size_of: Callable[[Any], float] | None = None
    """A sample's cost, its length say; the probe runs the costliest. ``None``: found by a scan."""
    name: str = "workload"

    def __post_init__(self) -> None:
        """Check what can be checked without running anything.

        Raises:
            InputError: a field is not what it must be; the message names it.
        """
        for field in ("model", "loss", "optimizer"):
            if not callable(getattr(self, field)):
                raise InputError(
                    f"Workload({field}=…) must be a function, found {_kind(getattr(self, field))}"
                )
        for field in ("collate", "schedule", "metrics", "size_of"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise InputError(f"Workload({field}=…) must be a function or None, found {_kind(value)}")
        for field in ("train_data", "validation_data"):
            data = getattr(self, field)
            if data is not None and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
                raise InputError(
                    f"Workload({field}=…) must have __getitem__ and __len__ (map-style), found {_kind(data)}"
                )
        if not len(self.train_data):  # type: ignore[arg-type]
            raise InputError("Workload(train_data=…) has 0 samples: at least 1 is needed")
        if not (isinstance(self.learning_rate, int | float) and self.learning_rate > 0):
            raise InputError(
                f"Workload(learning_rate=…) must be a number over 0, found {self.learning_rate!r}"
            )
        if self.base_batch is not None and not (isinstance(self.base_batch, int) and self.base_batch >= 1):
            raise InputError(f"Workload(base_batch=…) must be 1 or more, or None, found {self.base_batch!r}")


def load_workload(reference: str) -> Workload:
    """Find and call the function that ``module:function`` or ``path/to/file.py:function`` names.

    The working directory is importable, as for ``python -m``.

    Raises:
        InputError: there is no such file, module or function, or it returns no `Workload`.
    """
    place, _, function = reference.rpartition(":")
    if not place or not function:
        raise InputError(
            f"{reference!r} names no workload: write module:function or path/to/file.py:function"
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    make = getattr(module, function, None)
    if make is None:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(f"{place} has no {function!r}; it has: {', '.join(names) or 'no function'}")
    with user_code(reference):
        workload = make() if callable(make) and not isinstance(make, Workload) else make
    if not isinstance(workload, Workload):
        raise InputError(f"{reference} returned {_kind(workload)}, not an autobatch.Workload")
    return workload


@contextmanager
def user_code(part: str) -> Iterator[None]:
    """Note on any error that it came out of the user's own ``part``; the error itself passes untouched."""
    try:
        yield
    except AutobatchError:
        raise
    except (Exception, SystemExit) as error:
        blame(error, part)
        raise


_BLAME = "raised by the workload: "


def blame(error: BaseException, part: str) -> None:
    """Note (PEP 678) on an error that it came out of the user's own ``part``, once."""
    if blamed_part(error) is None:
        error.add_note(_BLAME + part)


def blamed_part(error: BaseException) -> str | None:
    """The part of the workload that an error came out of, if it was noted."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_BLAME):
            return str(note.removeprefix(_BLAME))
    return None


def remarks_on(error: BaseException) -> list[str]:
    """What was noted on an error besides: neither a traceback nor whose it is."""
    notes = (str(note) for note in getattr(error, "__notes__", ()))
    return [note for note in notes if "\n" not in note and not note.startswith(_BLAME)]


def describe(error: BaseException) -> str:
    """One line on an error of the user's code: the part, the exception, and their file and line."""
    place = user_frame(error)
    part = blamed_part(error)
    whose = f"the workload's {part}" if part else "the workload"
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else repr(error.code)})"
    else:
        text = (str(error).splitlines() or [""])[0]
        did = f"raised {type(error).__name__}: {text}".removesuffix(": ")
    return f"{whose} {did}" + (f" ({place})" if place else "")


def user_frame(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame that is the user's: neither ours nor an installed package's."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    foreign = (f"{Path(__file__).parent}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<frozen ")
    found = None
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(foreign) and not {"site-packages", "dist-packages"} & set(Path(file).parts):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _load_module(name: str) -> Any:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"{name!r} names no module: write module:function or path/to/file.py:function")
    _importable(Path.cwd())
    try:
        # Imports the packages above it, which are the user's own code.
        with user_code(name):
            found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        found = None
    except ValueError:
        found = None
    if found is None:
        raise InputError(f"there is no module {name!r} to import from {Path.cwd()}")
    with user_code(name):
        return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"there is no file {path} (looked from {Path.cwd()})")
    _importable(path.resolve().parent)
    # Registered, so that worker processes and pickles can find what it defines; never over another module.
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    name = path.stem if known is None else f"{path.stem}_workload"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with user_code(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _kind(value: object) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"
