"""Options: one check for all values, wherever they come from, and keywords that a type checker knows."""

from __future__ import annotations

import inspect
import os
import pydoc
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autobatch
from autobatch import InputError
from autobatch.core.options import TrackerChoice, fields_of
from tests.support.options import as_options, required


@given(st.integers(1, 2**62), st.integers(0, 10**6), st.floats(1e-6, 1e9))
def test_text_and_plain_values_give_the_same_options(target: int, trials: int, timeout: float) -> None:
    values = {"target_batch": target, "trials": trials, "timeout": timeout, "json": True, "out": Path("a/b")}
    text = {name: str(value).lower() if value is True else str(value) for name, value in values.items()}
    options = as_options("fit", **values)
    assert options == as_options("fit", **text)
    assert options == as_options("fit", **options.by_name())


def test_numbers_of_numpy_are_accepted() -> None:
    options = as_options("plan", target_batch=np.int64(8), max_grad_norm=np.float32(0.5))
    assert (options.target_batch, options.train.max_grad_norm) == (8, 0.5)


def test_knobs_may_have_hyphens_and_spaces() -> None:
    knobs = "precision, channels-last,precision"
    assert as_options("tune", target_batch=8, knobs=knobs).tune.knobs == knobs


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3", "sim:rtx-4090", "sim:./card.toml"])
def test_valid_devices_are_accepted(device: str) -> None:
    assert as_options("probe", device=device).device.device == device


def deep_table() -> dict[str, Any]:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    return deep


WORKERS = "workers must be a whole number from 0 to 1024, found"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("probe", {"device": device}, "names no device: write auto, cuda, cuda:N, cpu or sim:PROFILE")
        for device in ("", "tpu", "cuda:", "cuda:x", "cuda:-1", "sim:", "cpu:0", "CUDA")
    ),
    ("fit", {"target_bach": 8}, "there is no option target_bach; did you mean target_batch?"),
    ("fit", {"batch_size": 8}, "there is no option batch_size; did you mean target_batch?"),
    ("probe", {"--batch-size": 8}, "there is no option --batch-size; did you mean micro_batch?"),
    ("tune", {"lr": 8}, "there is no option lr; did you mean tune_lr?"),
    ("estimate", {"fsdp": True}, "there is no option fsdp; did you mean parallel?"),
    ("probe", {"zzz": 3}, "there is no option zzz; there are: device, ema, gradient_dtype, json, max_grad_"),
    ("plan", {"target_batch": "8.5"}, "target_batch must be a whole number of 1 or more, found '8.5'"),
    ("plan", {"target_batch": None}, "target_batch must be a whole number of 1 or more, found None"),
    ("fit", {"memory_budget": "0%"}, "memory_budget: '0%' is not a share of memory"),
    ("fit", {"steps": 2, "epochs": 2}, "steps 2 and epochs 2 exclude each other"),
    ("fit", {"out": b"x"}, "out must be text, found b'x'"),
    ("fit", {"ema": 1}, "ema must be a number over 0 and under 1, found 1"),
    ("fit", {"timeout": "0"}, "timeout must be a number over 0, found '0'"),
    ("fit", {"json": 3}, "json must be true or false, found 3"),
    ("fit", {"split": "sizes"}, "split must be one of auto, count, size, found 'sizes'"),
    ("fit", {"micro_batch_multiple": 0}, "must be a whole number of 1 or more, found 0"),
    ("estimate", {"profile": 4090}, "profile must be one or more names, found 4090"),
    ("tune", {"knobs": "precison"}, "knobs: there is no knob 'precison'; did you mean precision"),
    ("tune", {"knobs": ""}, "knobs: there is no knob ''; there are: micro_batch_shift, precision"),
    ("fit", {"log": "tensorbord"}, "log must be one or more of tensorboard, wandb, mlflow, found"),
    ("fit", {"ranks": "1,2"}, "ranks must be a whole number from 1 to 1024, found '1,2'"),
    ("estimate", {"ranks": "1,,2"}, "must be whole numbers of 1 or more with commas between them, found"),
    ("fit", {"workers": 10**9}, f"{WORKERS} 1000000000"),
    ("fit", {"workers": "1000000000"}, f"{WORKERS} '1000000000'"),
    ("fit", {"steps": 10**30}, f"steps must be at most 9223372036854775807, found {10**30}"),
    ("fit", {"steps": 1 << 20_000}, "found a value of type int that is too long to show"),
    ("fit", {"steps": "9" * 5000}, "steps must be a whole number of 1 or more, found '999"),
    ("fit", {"memory_budget": 1 << 20_000}, "memory_budget"),
    ("fit", {"out": "a\0b"}, r"out must be text in UTF-8 without NUL, found 'a\x00b'"),
    ("tune", {"lr_steps": 4}, "the option lr_steps is gone: --tune-lr runs 40"),
    ("fit", {"storage": "a\udcff"}, r"storage must be text in UTF-8 without NUL, found 'a\udcff'"),
]


@pytest.mark.parametrize(("command", "values", "said"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_values_are_refused_in_one_line(command: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        as_options(command, **{**required(command), **values})
    assert said in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


def test_a_missing_option_and_a_table_without_end_are_refused() -> None:
    with pytest.raises(InputError, match="target_batch is missing: give a whole number of 1 or more"):
        as_options("fit")
    deep = deep_table()
    with pytest.raises(InputError, match="found a value of type dict that is too long to show"):
        as_options("fit", target_batch=8, steps=deep)
    while deep:  # freed one by one: Python would recurse
        deep = deep.pop("a")


CALLS = ("fit", "plan", "probe", "tune", "estimate")
SAMPLES: dict[Any, Any] = {
    str: "cuda:1", int: 4, float: 0.5, bool: True, NoneType: None, os.PathLike[str]: Path("a/b"),
    Sequence[str]: ("a", "b"), Sequence[TrackerChoice]: ("wandb",),
}  # fmt: skip
TEXTS = {
    "memory_budget": "80%", "knobs": "precision,compile", "ranks": "1,8", "checkpoint_every": "15min",
}  # fmt: skip
"""Text of the options that are checked beyond their type."""


def keywords_of(call: str) -> dict[str, Any]:
    """Return the type of each keyword that a call passes on."""
    (kind,) = get_args(get_type_hints(getattr(autobatch, call))["options"])
    return get_type_hints(kind)


def members(hint: Any) -> set[Any]:
    """Return the members of a union, each literal as a type of its own."""
    if get_origin(hint) is Literal:
        return {Literal[one] for one in get_args(hint)}  # type: ignore[valid-type]
    if get_origin(hint) in (list, Sequence, os.PathLike) or not get_args(hint):
        return {hint}
    annotated = hasattr(hint, "__metadata__")
    return {one for part in get_args(hint)[: 1 if annotated else None] for one in members(part)}


@pytest.mark.parametrize("name", CALLS)
def test_every_option_that_a_call_can_use_is_a_keyword(name: str) -> None:
    fields = fields_of(name)
    own = inspect.signature(getattr(autobatch, name)).parameters
    hidden = {"json", "quiet", "verbose"}
    assert keywords_of(name).keys() | (own.keys() & fields.keys()) == fields.keys() - hidden
    needed = {key for key in own.keys() & fields.keys() if own[key].default is inspect.Parameter.empty}
    assert needed == {key for key, field in fields.items() if name in field.about.required_by}


@pytest.mark.parametrize("name", CALLS)
def test_the_type_of_a_keyword_is_that_of_its_option(name: str) -> None:
    for key, hint in keywords_of(name).items():
        field, given = fields_of(name)[key], members(hint)
        texts = {str} if key == "ranks" and name != "estimate" else set()  # several only in an estimate
        for member in members(field.type) - texts:
            is_list = get_origin(member) is list
            assert (Sequence[get_args(member)[0]] if is_list else member) in given, key
        assert (NoneType in given) == (field.default is None), key
        for member in given:
            values = list(get_args(member)) if get_origin(member) is Literal else [SAMPLES[member]]
            for value in [TEXTS[key]] if member is str and key in TEXTS else values:
                found = as_options(name, **{**required(name), key: value}).by_name()[key]
                kept = [value] if key in ("profile", "snapshot", "log") and isinstance(value, str) else value
                kept = list(kept) if isinstance(kept, tuple) else kept
                assert found == (str(value) if isinstance(value, Path) else kept), key


@pytest.mark.parametrize("name", CALLS)
def test_help_lists_every_keyword_with_its_type_and_default(name: str) -> None:
    """What `help` prints of a call."""
    call = getattr(autobatch, name)
    printed = " ".join(pydoc.plain(pydoc.render_doc(call)).split())
    signature = inspect.signature(call).parameters
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.values())
    for key, field in fields_of(name).items():
        if key in ("json", "quiet", "verbose"):
            continue
        assert f"{key}: " in printed
        if key in keywords_of(name):
            assert signature[key].default == field.default
            listed = printed.split(f" {key} (")[1]
            assert listed.partition("): ")[0].endswith(f"default {field.default!r}"), key
    assert ("timeout (float or None in seconds, default None): Start no further" in printed) == (
        "timeout" in fields_of(name)
    )
