"""Keywords of the library calls besides ``target_batch``, for editors and type checkers.

They are the options of the command of the same name, as plain values or as text. `autobatch.core.options`
defines and checks them, and a test compares the two.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from autobatch.core.options import SplitCheck, Tracker, fields_of
from autobatch.core.records import LearningRateRule, Precision

StrPath = str | os.PathLike[str]
CallT = TypeVar("CallT", bound=Callable[..., Any])


class Keywords(TypedDict, total=False):
    """Keywords of all calls. A call refuses those that its command does not take."""

    split: Literal["auto", "count", "size"]
    split_check: SplitCheck | None
    lr_rule: LearningRateRule
    base_batch: int | None
    device: str
    memory_budget: str | int | None
    precision: Precision
    gradient_dtype: Literal["auto", "fp32", "weights"]
    seed: int
    max_micro_batch: int | None
    micro_batch_multiple: int
    micro_batch: int | None
    profile: str | Sequence[str]
    snapshot: str | Sequence[str]
    steps: int | None
    epochs: int | None
    max_grad_norm: float | None
    ema: float | None
    on_nonfinite: Literal["raise", "skip"]
    workers: int | None
    validate_every: int | None
    checkpoint_every: int | str | None
    log: Tracker | Sequence[Tracker]
    keep_last: int
    resume: bool
    out: StrPath | None
    trials: int | None
    timeout: float | None
    knobs: str | None
    tune_lr: bool
    sequence: int | None
    lora: int | None
    checkpointing: bool
    ranks: int | str | None
    parallel: Literal["auto", "replicate", "shard"]
    collective_timeout: float


def listing_keywords(call: CallT) -> CallT:
    """Add every keyword of a call to its docstring and to the signature that ``help`` shows."""
    fields = [field for name, field in fields_of(call.__name__).items() if name in Keywords.__annotations__]
    lines = [f"    {one.name} ({one.expected}, default {one.default!r}): {one.text}" for one in fields]
    call.__doc__ = "\n".join([inspect.cleandoc(call.__doc__ or ""), "", "Keywords:", *lines])
    named = [*inspect.signature(call).parameters.values()][:-1]
    more = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        for field in fields
    ]
    call.__signature__ = inspect.signature(call).replace(parameters=[*named, *more])  # type: ignore[attr-defined]
    return call
