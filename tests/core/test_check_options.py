"""The check of all options: one for all values, wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch import InputError
from autobatch.core.check_options import OTHER_NAMES, expected, options_from, unknown_option
from autobatch.core.options import (
    AtLeastOne,
    AtLeastZero,
    Decay,
    Option,
    Positive,
    Seed,
    all_fields,
    fields_of,
)


@given(st.integers(1, 2**62), st.integers(0, 10**6), st.floats(1e-6, 1e9))
def test_text_and_plain_values_give_the_same_options(target: int, trials: int, timeout: float) -> None:
    values = {"target_batch": target, "trials": trials, "timeout": timeout, "json": True, "out": Path("a/b")}
    text = {name: str(value).lower() if value is True else str(value) for name, value in values.items()}
    options = options_from("fit", values)
    assert options == options_from("fit", text)
    assert options == options_from("fit", options.by_name())


def test_numbers_of_numpy_are_accepted() -> None:
    options = options_from("plan", {"target_batch": np.int64(8), "max_grad_norm": np.float32(0.5)})
    assert (options.target_batch, options.train.max_grad_norm) == (8, 0.5)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3", "sim:rtx-4090", "sim:./card.toml"])
def test_valid_devices_are_accepted(device: str) -> None:
    assert options_from("probe", {"device": device}).device.device == device


@pytest.mark.parametrize("device", ["", "tpu", "cuda:", "cuda:x", "cuda:-1", "sim:", "cpu:0", "CUDA"])
def test_invalid_devices_are_refused(device: str) -> None:
    with pytest.raises(InputError, match="names no device: write auto, cuda, cuda:N, cpu or sim:PROFILE"):
        options_from("probe", {"device": device})


def test_errors_name_the_keywords_of_library_calls() -> None:
    for keywords, said in (
        ({"target_bach": 8}, r"there is no option target_bach; did you mean target_batch\?"),
        ({}, "target_batch is missing: give a whole number of 1 or more"),
        ({"target_batch": "8.5"}, "target_batch must be a whole number of 1 or more, found '8.5'"),
        ({"target_batch": None}, "target_batch must be a whole number of 1 or more, found None"),
        ({"target_batch": 8, "memory_budget": "0%"}, "memory_budget: '0%' is not a share of memory"),
        ({"target_batch": 8, "steps": 2, "epochs": 2}, "steps 2 and epochs 2 exclude each other"),
        ({"target_batch": 8, "out": b"x"}, "out must be text, found b'x'"),
        ({"target_batch": 8, "ema": 1}, "ema must be a number over 0 and under 1, found 1"),
        ({"target_batch": 8, "ema": "0"}, "ema must be a number over 0 and under 1, found '0'"),
    ):
        with pytest.raises(InputError, match=said):
            options_from("fit", keywords)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": 10**9}, "workers must be a whole number from 0 to 1024, found 1000000000"),
        ({"workers": "1000000000"}, "workers must be a whole number from 0 to 1024, found '1000000000'"),
        ({"prefetch": 10**6}, "prefetch must be a whole number from 1 to 1024, found 1000000"),
        ({"steps": 10**30}, f"steps must be at most 9223372036854775807, found {10**30}"),
        ({"steps": 1 << 20_000}, "found a value of type int that is too long to show"),
        ({"steps": "9" * 5000}, "steps must be a whole number of 1 or more, found '999"),
        ({"memory_budget": 1 << 20_000}, "memory_budget"),
        ({"out": "a\0b"}, r"out must be text in UTF-8 without NUL, found 'a\x00b'"),
        ({"study": "a\udcff"}, r"study must be text in UTF-8 without NUL, found 'a\udcff'"),
    ],
    ids=range(9),
)
def test_what_no_machine_can_hold_is_refused_in_one_line(values: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as raised:
        options_from("fit", {"target_batch": 8, **values})
    assert said in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 300


def test_a_table_without_end_is_refused_in_one_line() -> None:
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InputError, match="found a value of type dict that is too long to show"):
        options_from("fit", {"target_batch": 8, "steps": deep})
    while deep:  # freed one by one: Python would recurse
        deep = deep.pop("a")  # type: ignore[assignment]


HELP = Option("Text.", "N")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (int, "a whole number"),
        (str | int | None, "text or a whole number"),
        (AtLeastOne, "a whole number of 1 or more"),
        (AtLeastZero | None, "a whole number of 0 or more"),
        (Annotated[AtLeastOne, HELP], "a whole number of 1 or more"),
        (Annotated[AtLeastOne | None, HELP], "a whole number of 1 or more"),
        (Annotated[Seed, HELP], "a whole number from 0 to 2147483647"),
        (Positive, "a number over 0"),
        (Annotated[Decay | None, HELP], "a number over 0 and under 1"),
        (Annotated[Literal["a", "b"], HELP], "one of a, b"),
        (Annotated[list[str], HELP], "one or more names"),
    ],
)
def test_the_expected_values_are_described(annotation: Any, words: str) -> None:
    assert expected(annotation) == words


@pytest.mark.parametrize(
    ("asked", "command", "said"),
    [
        ("stpes", "fit", "did you mean steps?"),
        ("zzz", "probe", "there are: device, ema, gradient_dtype, json, max_grad_norm, "),
        ("batch_size", "fit", "did you mean target_batch?"),
        ("--batch-size", "probe", "did you mean micro_batch?"),
        ("--lr", "tune", "did you mean tune_lr?"),
        ("fsdp", "estimate", "did you mean parallel?"),
    ],
)
def test_an_unknown_option_gets_the_one_that_was_meant_or_all(asked: str, command: str, said: str) -> None:
    assert unknown_option(asked, fields_of(command)).startswith(f"there is no option {asked}; {said}")


def test_every_option_that_stands_for_one_of_another_tool_exists() -> None:
    assert {one for options in OTHER_NAMES.values() for one in options} <= all_fields().keys()
    assert not OTHER_NAMES.keys() & all_fields().keys()
