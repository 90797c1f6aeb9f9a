"""Limits that are kept, and the traced steps beside them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch import InputError, Progress
from autobatch.core.files import write_atomic
from autobatch.core.units import GiB
from autobatch.footprint.fit import footprint
from autobatch.search import cache as kept_trace
from autobatch.search.cache import (
    SUFFIX,
    CachedLimit,
    find_trace,
    lookup,
    save_trace,
    store,
)
from tests.support.probes import limit_of
from tests.support.step_workloads import WORKLOADS, setting, setup


def a_limit(**changes):
    key = {
        "workload": "w1",
        "device": "NVIDIA H200",
        "total_bytes": 80 * GiB,
        "torch": "2.12.0",
        "budget_bytes": None,
    }
    return CachedLimit(
        key=key | changes, micro_batch=93, limited_by="memory", upper_bound_by="run", date="2026-11-20"
    )


def test_a_limit_is_found_by_its_exact_key_and_replaced(tmp_path):
    limit = a_limit()
    assert lookup(limit.key, tmp_path) == (None, None)
    path = store(limit, tmp_path)
    assert path.parent == tmp_path / "profiles" / "nvidia-h200" / "limits"
    known = {name: value for name, value in reversed(limit.key.items()) if value is not None}
    assert lookup(known, tmp_path) == (limit, None)
    for other in (a_limit(workload="w2").key, {"device": "NVIDIA H200"}):
        assert lookup(other, tmp_path) == (None, None)
    smaller = msgspec.structs.replace(limit, micro_batch=64)
    assert store(smaller, tmp_path) == path
    assert lookup(limit.key, tmp_path) == (smaller, None)


def test_the_nearest_and_newest_stale_limit_names_the_changed_fields(tmp_path):
    store(a_limit(torch="2.11.0", device="NVIDIA A10"), tmp_path)
    for day, version in (("2026-11-19", "2.10.0"), ("2026-11-21", "2.12.0"), ("2026-11-20", "2.11.0")):
        store(msgspec.structs.replace(a_limit(torch=version), date=day), tmp_path)
    key = a_limit(torch="2.13.0", budget_bytes=6 * GiB).key
    assert lookup(key, tmp_path) == (
        None,
        "the limit saved on 2026-11-21 is stale: budget_bytes, torch changed",
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON: "),
        (b"\xff\xfe", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b'{"micro_batch": ' + b"9" * 5000 + b"}", "is not JSON: "),
        (b"[1]", "Expected `object`"),
        (b'{"schema": 4, "fits": 1}', "unknown field"),
        (b'{"schema": 1}', "missing required field"),
        (b'{"key": {"workload": 1.5}}', r"\$\.key"),
        (
            msgspec.json.encode(msgspec.structs.replace(a_limit(), schema=4)),
            "schema 4, this autobatch reads 3",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_reason_and_kept(tmp_path, caplog, content, reason):
    path = store(a_limit(), tmp_path)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert lookup(a_limit().key, tmp_path) == (None, None)
    assert str(path) in caplog.text
    assert path.read_bytes() == content
    assert re.search(reason, caplog.text)


def test_a_file_under_a_wrong_name_counts_as_stale(tmp_path):
    path = store(a_limit(), tmp_path)
    path.write_bytes(msgspec.json.encode(a_limit(torch="2.1.0")))
    assert lookup(a_limit().key, tmp_path) == (None, "the limit saved on 2026-11-20 is stale: torch changed")


def test_a_data_directory_that_is_not_writable_is_named(tmp_path):
    home = write_atomic(tmp_path / "file", b"") / "home"  # below a file, where even root cannot write
    with pytest.raises(InputError, match=rf"{home.name}.* cannot be written: .*AUTOBATCH_HOME"):
        store(a_limit(), home)


@pytest.mark.parametrize(
    ("old", "new", "changed", "is_close"),
    [
        (1000, 1050, {}, True),
        (1000, 953, {}, True),
        (1000, 1054, {}, False),
        (1000, 952, {}, False),
        (1000, None, {}, False),
        (1000, 1001, {"precision": "bf16"}, False),
    ],
)
def test_a_budget_that_follows_free_memory_may_be_five_percent_off(tmp_path, old, new, changed, is_close):
    """All of these changes may come from options: they make no limit stale."""
    limit, key = a_limit(budget_bytes=old), a_limit(budget_bytes=new, **changed).key
    store(limit, tmp_path)
    assert lookup(key, tmp_path, may_vary=True) == (limit if is_close else None, None)
    assert lookup(key, tmp_path) == (None, None)


@pytest.fixture(scope="module")
def step():
    return footprint(setting(setup(WORKLOADS["perceptron"]())))


def test_a_trace_is_read_as_it_was_kept(tmp_path: Path, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "limit.json"
    ran = step.program.at(40)
    assert find_trace(file, 40, ran) is None
    save_trace(step, file)
    assert find_trace(file, 40, ran) == step
    # What ran differs, was not recorded, or another version traced.
    assert find_trace(file, 41, ran) is None
    assert find_trace(file, 40, None) is None
    monkeypatch.setattr(kept_trace, "__version__", "0.0.0")
    assert find_trace(file, 40, ran) is None


def test_a_damaged_file_is_traced_anew(tmp_path: Path, step: Any) -> None:
    file = tmp_path / "limit.json"
    file.with_suffix(SUFFIX).write_bytes(b"no trace")
    assert find_trace(file, 40, step.program.at(40)) is None


def test_a_confirmed_limit_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = limit_of(setup(WORKLOADS["perceptron"]()), tmp_path, Progress())

    def no_trace(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("autobatch.setup.trace.trace_footprint", no_trace)
    again = limit_of(setup(WORKLOADS["perceptron"]()), tmp_path, Progress())
    assert again.probe.source.startswith("saved")
    assert again.footprint == first.footprint is not None
