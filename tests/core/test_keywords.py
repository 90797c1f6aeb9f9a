"""Keywords of the library calls against the options, which are the oracle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Required, get_args, get_origin, get_type_hints

import pytest

from autobatch.core import keywords
from autobatch.core.check_options import options_from, plain_type
from autobatch.core.errors import InputError
from autobatch.core.options import COMMANDS, MOST_WORKERS, fields_of

PRINTING = {"json", "quiet", "verbose"}
"""Options that only change what the command line prints."""
CALLS = {name: getattr(keywords, f"{name.capitalize()}Keywords") for name in COMMANDS}
PAIRS = [(name, key) for name, call in CALLS.items() for key in get_type_hints(call)]
SAMPLES: dict[Any, list[Any]] = {
    str: ["cpu", "4GiB"],
    int: [4, 2**31 - 1],
    float: [0.5, 1],
    bool: [True, False],
    NoneType: [None],
    os.PathLike[str]: [Path("a/b")],
    Sequence[str]: [["a", "b"], ("a",)],
}
TEXTS = {"device": "cuda:1", "memory_budget": "80%", "knobs": "precision,compile"}
"""Text of the options that are checked beyond their type."""


def members(hint: Any) -> set[Any]:
    """Return the members of a union, each literal as a type of its own."""
    if get_origin(hint) is Required:
        return members(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return {Literal[one] for one in get_args(hint)}  # type: ignore[valid-type]
    if get_origin(hint) in (list, Sequence, os.PathLike) or not get_args(hint):
        return {hint}
    return {one for part in get_args(hint) for one in members(plain_type(part))}


def hints_of(name: str) -> dict[str, Any]:
    return get_type_hints(CALLS[name], include_extras=True)


def as_option(key: str, value: Any) -> Any:
    """Return the value as the options keep it."""
    if key == "profile":
        return [value] if isinstance(value, str) else list(value)
    return str(value) if isinstance(value, Path) else value


def needed(name: str) -> dict[str, Any]:
    return {"target_batch": 8} if name in ("plan", "tune", "fit") else {}


@pytest.mark.parametrize("name", CALLS)
def test_every_option_that_a_call_can_use_is_a_keyword(name: str) -> None:
    fields = fields_of(name)
    assert hints_of(name).keys() == fields.keys() - PRINTING
    assert CALLS[name].__required_keys__ == {
        key for key, field in fields.items() if name in field.about.required_by
    }


@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_every_value_of_a_keyword_is_accepted(name: str, key: str) -> None:
    for member in members(hints_of(name)[key]):
        values = list(get_args(member)) if get_origin(member) is Literal else SAMPLES[member]
        if member is float and key == "ema":
            values = [0.5, 0.999]
        if member is str and key in TEXTS:
            values = [TEXTS[key]]
        if key in ("workers", "prefetch", "ranks"):
            values = [4, MOST_WORKERS] if member is int else values
        for value in values:
            found = options_from(name, {**needed(name), key: value}).by_name()[key]
            assert found == as_option(key, value)


@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_every_type_of_an_option_can_be_given(name: str, key: str) -> None:
    field = fields_of(name)[key]
    given = members(hints_of(name)[key])
    for member in members(plain_type(field.type)):
        is_left_out = member is NoneType and name in field.about.required_by
        assert is_left_out or (Sequence[str] if member == list[str] else member) in given
    assert (NoneType in given) == (field.default is None and name not in field.about.required_by)


def test_a_value_beyond_the_type_is_refused_by_the_options() -> None:
    with pytest.raises(InputError, match="precision must be one of"):
        options_from("plan", {**needed("plan"), "precision": "fp8"})
