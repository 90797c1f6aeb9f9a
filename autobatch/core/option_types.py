"""Building blocks of the options: number ranges, help data, and the messages about wrong values."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

from autobatch.core.text import LONGEST_VALUE, printable
from autobatch.core.usual_words import answer_to

AtLeastZero = Annotated[int, Meta(ge=0)]
LARGEST_INTEGER = 2**63 - 1
"""Largest whole number of an option: torch and the files count in 64 bits."""
MOST_WORKERS = 1024
"""Largest number of processes, and of micro-batches that each loads ahead."""
Workers = Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
Prefetch = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
LocalRanks = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Seeds that every generator accepts: NumPy's end at 32 bits, and the sampler counts up from here."""
Positive = Annotated[float, Meta(gt=0)]
Decay = Annotated[float, Meta(gt=0, lt=1)]
Group = Literal["what to train", "memory", "learning rate", "run", "tuning", "output"]
"""Groups of the help, in the order in which it shows them."""


class OptionHelp(NamedTuple):
    """Help data of an option, kept in the annotation of its field."""

    text: str
    group: Group
    metavar: str = ""
    """Placeholder of the value; empty for switches and choices."""
    common: bool = False
    """True if ``--help`` shows the option; ``--help-all`` shows every option."""


Parallelism = Annotated[
    Literal["auto", "replicate", "shard"],
    OptionHelp(
        "With --ranks: replicate gives each rank a whole model (DDP), shard a part of it (FSDP2). auto: "
        "shard if no whole model fits.",
        "what to train",
    ),
]
ShardReduction = Annotated[
    Literal["each", "once"],
    OptionHelp(
        "With --parallel shard: reduce gradients after each micro-batch, or once per step, which takes "
        "memory for all of them.",
        "what to train",
    ),
]
ShardedModules = Annotated[
    str | None,
    OptionHelp(
        "With --parallel shard: regular expression for the names of the modules to gather one at a time. "
        "Without it: the repeated blocks of the model.",
        "what to train",
        "REGEX",
    ),
]


def help_of(field: msgspec.structs.FieldInfo) -> OptionHelp:
    """Return the help data in the annotation of an option."""
    return next(one for one in get_args(field.type) if isinstance(one, OptionHelp))


def plain_type(annotation: Any) -> Any:
    """Return the type of an option without its annotations: ``bool``, ``list[str]``, ``int | None``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values that an option can take; empty if its type does not list them."""
    plain = plain_type(annotation)
    return get_args(plain) if get_origin(plain) is Literal else ()


def expected(annotation: Any) -> str:
    """Describe the values that an option accepts, for example ``a whole number of 1 or more``."""
    plain = plain_type(annotation)
    if plain is not annotation:
        limits = [one for one in get_args(annotation)[1:] if isinstance(one, Meta)]
        return _limited(plain, limits[0]) if limits else expected(plain)
    if get_origin(plain) is Literal:
        return f"one of {', '.join(get_args(plain))}"
    if get_origin(plain) is list:
        return "one or more names"
    if isinstance(plain, types.UnionType) or get_origin(plain) is not None:
        return " or ".join(expected(part) for part in get_args(plain) if part is not type(None))
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[plain]


def unknown_option(asked: str, names: Iterable[str]) -> str:
    """Return the message about an option that does not exist, with the nearest name that does."""
    names = sorted(names)
    near = difflib.get_close_matches(asked, names, n=1)
    hint = answer_to(asked, names, str) or (
        f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
    )
    return f"there is no option {printable(asked, limit=LONGEST_VALUE)}; {hint}"


def _limited(kind: type, meta: Meta) -> str:
    number = "a whole number" if kind is int else "a number"
    if meta.le is not None:
        return f"{number} from {meta.ge} to {meta.le}"
    if meta.lt is not None:
        return f"{number} over {meta.gt} and under {meta.lt}"
    return f"{number} of {meta.ge} or more" if meta.ge is not None else f"{number} over {meta.gt}"
