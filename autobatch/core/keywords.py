"""Keywords of the library calls besides ``target_batch``, for editors and type checkers.

Each type lists the options of a command that a call accepts, with the plain values that a user may pass. The
options that only change what the command line prints (``json``, ``quiet``, ``verbose``) are left out. A test
compares these types with `autobatch.core.options`, which defines the options and checks their values.
"""

import inspect
import os
import textwrap
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from autobatch.core.options import (
    GradientDtypeChoice,
    ParallelChoice,
    SplitCheck,
    SplitChoice,
    TrackerChoice,
    fields_of,
)
from autobatch.core.records import LearningRateRule, Precision

StrPath = str | os.PathLike[str]
CallT = TypeVar("CallT", bound=Callable[..., Any])
HELP_COLUMNS = 100


class CommonKeywords(TypedDict, total=False):
    """Keywords of every call."""

    device: str
    memory_budget: str | int | None
    precision: Precision
    gradient_dtype: GradientDtypeChoice
    seed: int
    max_micro_batch: int | None
    micro_batch_multiple: int
    parallel: ParallelChoice


class EstimateKeywords(CommonKeywords, total=False):
    """Keywords of `autobatch.estimate`."""

    profile: str | Sequence[str]
    snapshot: str | Sequence[str]
    micro_batch: int | None
    ranks: int | str | None
    sequence: int | None
    lora: int | None
    checkpointing: bool


class SearchKeywords(CommonKeywords, total=False):
    """Keywords of the calls that search for the largest micro-batch."""

    ranks: int | None
    max_grad_norm: float | None
    ema: float | None


class ProbeKeywords(SearchKeywords, total=False):
    """Keywords of `autobatch.probe`."""

    micro_batch: int | None


class BatchKeywords(SearchKeywords, total=False):
    """Keywords of the calls that plan a batch."""

    split: SplitChoice
    lr_rule: LearningRateRule
    base_batch: int | None


class PlanKeywords(BatchKeywords, total=False):
    """Keywords of `autobatch.plan`."""

    split_check: SplitCheck | None


class TuneKeywords(BatchKeywords, total=False):
    """Keywords of `autobatch.tune`."""

    trials: int | None
    timeout: float | None
    storage: StrPath | None
    knobs: str | None
    tune_lr: bool
    out: StrPath | None


class FitKeywords(TuneKeywords, total=False):
    """Keywords of `autobatch.fit`."""

    steps: int | None
    epochs: int | None
    checkpoint_every: int | str | None
    validate_every: int | None
    on_nonfinite: Literal["raise", "skip"]
    split_check: SplitCheck | None
    log: TrackerChoice | Sequence[TrackerChoice]
    keep_last: int
    workers: int | None
    collective_timeout: float
    resume: bool


class Keyword(NamedTuple):
    """A keyword of a call, as ``help`` and the documentation show it."""

    name: str
    type: Any
    type_words: str
    unit: str
    """Unit of its value; empty if it has none, or if ``about`` names it."""
    default: Any
    about: str


KEYWORDS = {
    "probe": ProbeKeywords,
    "plan": PlanKeywords,
    "estimate": EstimateKeywords,
    "tune": TuneKeywords,
    "fit": FitKeywords,
}
"""Keywords by the name of their call."""


def keywords_of(call: str) -> list[Keyword]:
    """Return the keywords of a call besides those that its signature names."""
    fields = fields_of(call)
    return [
        Keyword(name, hint, _in_words(hint), fields[name].unit, fields[name].default, fields[name].about.text)
        for name, hint in get_type_hints(KEYWORDS[call]).items()
    ]


def listing_keywords(call: CallT) -> CallT:
    """Add every keyword of a call to its docstring and to the signature that ``help`` shows."""
    found = keywords_of(call.__name__)
    lines = [inspect.cleandoc(call.__doc__ or ""), "", "Keywords:"]
    for one in found:
        unit = f" in {one.unit}" if one.unit else ""
        text = f"{one.name} ({one.type_words}{unit}, default {one.default!r}): {one.about}"
        lines.append(textwrap.fill(text, HELP_COLUMNS, initial_indent=" " * 4, subsequent_indent=" " * 8))
    call.__doc__ = "\n".join(lines)
    signature = inspect.signature(call)
    named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(one.name, kind, default=one.default, annotation=one.type) for one in found]
    call.__signature__ = signature.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
    return call


def _in_words(hint: Any) -> str:
    """Describe a type: ``int or None``, ``'auto' or 'fp32'``, ``list of str``."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is Sequence:
        (member,) = get_args(hint)
        return f"list of {'these' if get_origin(member) is Literal else _in_words(member)}"
    if get_origin(hint) is os.PathLike:
        return "path"
    if parts := get_args(hint):
        return " or ".join(map(_in_words, parts))
    return "None" if hint is NoneType else str(hint.__name__)
