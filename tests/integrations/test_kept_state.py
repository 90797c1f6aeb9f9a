"""Attributes that are kept, against what user code writes to them."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace

import pytest

from autobatch.integrations.kept_state import MOST_ITEMS, kept_state


def test_what_is_written_within_the_block_is_gone_after_it() -> None:
    data = [0] * (MOST_ITEMS + 1)
    model = object()
    figures = {"train": defaultdict(list, loss=[1.0])}
    owner = SimpleNamespace(
        figures=figures, count=3, names={"a"}, last=deque([1], maxlen=2), data=data, model=model
    )
    with kept_state(owner):
        owner.figures["train"]["loss"].append(2.0)
        owner.figures["train"]["entropy"].append(2.0)
        owner.figures["eval"] = {}
        owner.count += 1
        owner.names.add("b")
        owner.last.append(2)
        owner.new = 1
    assert owner.figures == {"train": {"loss": [1.0]}}
    assert owner.figures["train"].default_factory is list
    assert (owner.count, owner.names, list(owner.last), owner.last.maxlen) == (3, {"a"}, [1], 2)
    assert not hasattr(owner, "new")
    assert owner.data is data
    assert owner.model is model


def test_attributes_are_restored_after_an_error() -> None:
    owner = SimpleNamespace(count=1)

    def fail() -> None:
        with kept_state(owner):
            owner.count = 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert owner.count == 1
