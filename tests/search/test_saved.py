"""Limits that are kept, and the programs of their steps beside them."""

from __future__ import annotations

import logging
import re

import msgspec
import pytest

from autobatch.core.units import GiB, KiB
from autobatch.search.saved import SavedLimit, path_of, recall
from tests.support.probes import limit_of
from tests.support.step_workloads import WORKLOADS, setup


def a_limit(**changes):
    key = {
        "workload": "w1",
        "device": "NVIDIA H200",
        "total_bytes": 80 * GiB,
        "torch": "2.12.0",
        "budget_bytes": None,
    }
    return SavedLimit(key=key | changes, micro_batch=93, date="2026-11-20")


def store(limit, home):
    path = path_of(limit.key, home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(limit))
    return path


def test_a_limit_is_found_by_its_exact_key_and_replaced(tmp_path):
    limit = a_limit()
    assert recall(limit.key, tmp_path) is None
    path = store(limit, tmp_path)
    assert path.parent == tmp_path / "profiles" / "nvidia-h200" / "limits"
    known = {name: value for name, value in reversed(limit.key.items()) if value is not None}
    assert recall(known, tmp_path) == limit
    for other in (a_limit(workload="w2").key, {"device": "NVIDIA H200"}):
        assert recall(other, tmp_path) is None
    smaller = msgspec.structs.replace(limit, micro_batch=64)
    assert store(smaller, tmp_path) == path
    assert recall(limit.key, tmp_path) == smaller


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON: "),
        (b"\xff\xfe", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b'{"micro_batch": ' + b"9" * 5000 + b"}", "is not JSON: "),
        (b"[1]", "Expected `object`"),
        (b'{"schema": 5, "fits": 1}', "unknown field"),
        (b'{"schema": 1}', "missing required field"),
        (b'{"key": {"workload": 1.5}}', r"\$\.key"),
        (
            msgspec.json.encode(msgspec.structs.replace(a_limit(), schema=5)),
            "schema 5, this autobatch reads 4",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_reason_and_kept(tmp_path, caplog, content, reason):
    path = store(a_limit(), tmp_path)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert recall(a_limit().key, tmp_path) is None
    assert str(path) in caplog.text
    assert path.read_bytes() == content
    assert re.search(reason, caplog.text)


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
    limit, key = a_limit(budget_bytes=old), a_limit(budget_bytes=new, **changed).key
    store(limit, tmp_path)
    assert recall(key, tmp_path, may_vary=True) == (limit if is_close else None)
    assert recall(key, tmp_path) is None


def test_programs_that_are_of_no_use_cost_a_search_and_no_more(tmp_path):
    perceptron = setup(WORKLOADS["perceptron"](), budget=500 * KiB)
    first = limit_of(perceptron, tmp_path)
    (file,) = tmp_path.glob("profiles/*/limits/*.json")
    good = msgspec.json.decode(file.read_bytes(), type=SavedLimit)

    def again():
        found = limit_of(perceptron, tmp_path)
        assert found.probe.micro_batch == first.probe.micro_batch
        return len(found.probe.attempts)

    assert again() == 1
    limit_of(setup(WORKLOADS["perceptron"](), budget=600 * KiB, ema=0.9), tmp_path / "other")
    (of_other,) = tmp_path.glob("other/profiles/*/limits/*.json")
    other = msgspec.json.decode(of_other.read_bytes(), type=SavedLimit)
    # Damaged, of another version, of another step.
    for changed in ({"packed": b"no program"}, {"autobatch": "0.0"}, {"packed": other.packed}):
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(good, **changed)))
        assert again() > 1
        assert again() == 1
