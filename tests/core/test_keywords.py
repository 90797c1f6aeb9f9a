"""Keywords of the library calls against the options, which are the oracle."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import autobatch
from autobatch.core import keywords
from autobatch.core.check_options import options_from, plain_type
from autobatch.core.options import COMMANDS, fields_of

CALLS = {name: getattr(keywords, f"{name.capitalize()}Keywords") for name in COMMANDS}
PAIRS = [(name, key) for name, call in CALLS.items() for key in get_type_hints(call)]
SAMPLES: dict[Any, Any] = {
    str: "cuda:1", int: 4, float: 0.5, bool: True, NoneType: None, os.PathLike[str]: Path("a/b"),
    Sequence[str]: ("a", "b"),
}  # fmt: skip
TEXTS = {"memory_budget": "80%", "knobs": "precision,compile"}
"""Text of the options that are checked beyond their type."""


def members(hint: Any) -> set[Any]:
    """Return the members of a union, each literal as a type of its own."""
    if get_origin(hint) is Literal:
        return {Literal[one] for one in get_args(hint)}  # type: ignore[valid-type]
    if get_origin(hint) in (list, Sequence, os.PathLike) or not get_args(hint):
        return {hint}
    return {one for part in get_args(hint) for one in members(plain_type(part))}


@pytest.mark.parametrize("name", CALLS)
def test_every_option_that_a_call_can_use_is_a_keyword(name: str) -> None:
    fields = fields_of(name)
    own = inspect.signature(getattr(autobatch, name)).parameters
    assert get_type_hints(CALLS[name]).keys() | (own.keys() & fields.keys()) == fields.keys() - {
        "json", "quiet", "verbose"
    }  # fmt: skip
    required = {key for key in own.keys() & fields.keys() if own[key].default is inspect.Parameter.empty}
    assert required == {key for key, field in fields.items() if name in field.about.required_by}


@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_the_type_of_a_keyword_is_that_of_its_option(name: str, key: str) -> None:
    field = fields_of(name)[key]
    given = members(get_type_hints(CALLS[name])[key])
    for member in members(plain_type(field.type)):
        assert (Sequence[str] if member == list[str] else member) in given
    assert (NoneType in given) == (field.default is None)
    needed = {"target_batch": 8} if name in ("plan", "tune", "fit") else {}
    for member in given:
        values = list(get_args(member)) if get_origin(member) is Literal else [SAMPLES[member]]
        for value in [TEXTS[key]] if member is str and key in TEXTS else values:
            found = options_from(name, {**needed, key: value}).by_name()[key]
            as_kept = [value] if key == "profile" and isinstance(value, str) else value
            as_kept = list(as_kept) if isinstance(as_kept, tuple) else as_kept
            assert found == (str(value) if isinstance(value, Path) else as_kept)
