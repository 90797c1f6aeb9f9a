"""All records: immutable, and built by keyword."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from autobatch.core import records
from autobatch.core.records.base import Record
from autobatch.core.records.run import RunRecord
from tests.support.sample_run import a_device

KINDS = {
    kind
    for module in pkgutil.iter_modules(records.__path__, f"{records.__name__}.")
    for kind in vars(importlib.import_module(module.name)).values()
    if isinstance(kind, type) and issubclass(kind, Record)
}


def test_records_are_immutable_and_keyword_only() -> None:
    assert len(KINDS) > 15
    assert all(kind.__struct_config__.frozen for kind in KINDS)
    with pytest.raises(AttributeError, match="immutable"):
        a_device().kind = "cpu"
    with pytest.raises(TypeError):
        RunRecord(a_device())  # type: ignore[misc]
