"""Options: one check for all values, wherever they come from, and keywords that a type checker knows."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch import InputError
from autobatch.core.options import Keywords, all_fields
from tests.support.options import as_options, required


@given(st.integers(1, 2**62), st.integers(0, 10**6), st.floats(1e-6, 1e9))
def test_text_and_plain_values_give_the_same_options(target: int, trials: int, timeout: float) -> None:
    values = {"target_batch": target, "trials": trials, "timeout": timeout, "json": True, "out": Path("a/b")}
    text = {name: str(value).lower() if value is True else str(value) for name, value in values.items()}
    options = as_options("fit", **values)
    assert options == as_options("fit", **text)
    assert options == as_options("fit", **options.by_name())


ACCEPTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plan", {"target_batch": np.int64(8), "max_grad_norm": np.float32(0.5)}, {"max_grad_norm": 0.5}),
    *(("probe", {"device": one}, {}) for one in ("auto", "cpu", "cuda:3", "sim:rtx-4090", "sim:./card.toml")),
    ("fit", {"log": "wandb", "ranks": "4", "memory_budget": "80%"}, {"log": ["wandb"], "ranks": 4}),
    ("fit", {"memory_budget": 2**33, "checkpoint_every": "15min"}, {}),
    ("estimate", {"profile": ("a", "b"), "ranks": "8"}, {"profile": ["a", "b"], "ranks": 8}),
    ("fit", {"steps": None, "checkpoint_every": "5"}, {"checkpoint_every": 5}),
]


@pytest.mark.parametrize(("command", "values", "changed"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_valid_values_are_accepted(command: str, values: dict[str, Any], changed: dict[str, Any]) -> None:
    options = as_options(command, **{**required(command), **values})
    assert {name: getattr(options, name) for name in values} == {**values, **changed}
    assert options.checkpoint_seconds == (900 if values.get("checkpoint_every") == "15min" else None)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("probe", {"device": device}, "must be auto, cuda, cuda:N, cpu or sim:PROFILE, found")
        for device in ("", "tpu", "cuda:x", "sim:", "CUDA", "cpu\n")
    ),
    ("fit", {"target_bach": 8}, "there is no option target_bach; did you mean target_batch?"),
    ("plan", {"--batch-size": 8}, "there is no option --batch-size; did you mean target_batch?"),
    ("probe", {"batch_size": 8}, "did you mean micro_batch?"),
    ("tune", {"--lr-steps": 4}, "the option --lr-steps is gone: --tune-lr runs 40"),
    ("probe", {"zzz": 3}, "there is no option zzz; see autobatch probe --help-all"),
    ("probe", {"steps": 3}, "probe does not take steps, which is an option of fit; see autobatch probe"),
    ("plan", {"target_batch": np.zeros(2)}, "target_batch must be a whole number of 1 or more, found array("),
    ("fit", {"memory_budget": "0%"}, "memory_budget: '0%' is not a share of memory"),
    ("fit", {"steps": 2, "epochs": 2}, "steps 2 and epochs 2 exclude each other"),
    ("probe", {"micro_batch": 16, "max_micro_batch": 8}, "micro_batch 16 exceeds max_micro_batch 8"),
    ("probe", {"micro_batch": 9, "micro_batch_multiple": 2}, "no multiple of micro_batch_multiple 2"),
    ("fit", {"steps": 10**30}, f"steps must be a whole number of 1 or more, found {10**30}"),
    ("fit", {"ema": 1}, "ema must be a number over 0 and under 1, found 1"),
    ("fit", {"collective_timeout": 1e300}, "collective_timeout must be a number over 0, up to 1e9, found"),
    ("fit", {"json": 3}, "json must be true or false, found 3"),
    ("fit", {"split": "sizes"}, "split must be one of auto, count, size, found 'sizes'"),
    ("fit", {"seed": "null"}, "seed must be a whole number from 0 to 2147483647, found 'null'"),
    ("estimate", {"profile": 4090}, "profile must be one or more names, found 4090"),
    ("estimate", {"ranks": "1,2"}, "ranks must be a whole number from 1 to 1024, found '1,2'"),
    ("tune", {"knobs": "precison"}, "knobs: there is no knob 'precison'; there are: micro_batch_shift"),
    ("fit", {"log": "tensorbord"}, "log must be one or more of tensorboard, wandb, mlflow, found"),
    ("fit", {"checkpoint_every": "15min\n"}, r"or a time like 15min or 2h, found '15min\n'"),
    ("fit", {"out": "a\0b"}, r"out must be a folder in UTF-8, found 'a\x00b'"),
]


@pytest.mark.parametrize(("command", "values", "said"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_values_are_refused_in_one_line(command: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        as_options(command, **{**required(command), **values})
    assert said in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


def test_the_keywords_are_the_options_with_their_choices_and_defaults() -> None:
    fields = {name: field for name, field in all_fields().items() if field.group != "output"}
    hints = get_type_hints(Keywords)
    assert hints.keys() | {"target_batch"} == fields.keys()
    for name, hint in hints.items():
        assert (NoneType in get_args(hint)) == (fields[name].default is None), name
        assert all(f"'{choice}'" in str(hint) for choice in fields[name].choices), name
