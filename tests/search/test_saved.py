"""Limits that are kept, and the programs of their steps beside them."""

from __future__ import annotations

import logging
import re

import msgspec
import pytest

from autobatch.core.units import KiB
from autobatch.search.saved import SavedLimit, path_of, recall
from tests.support.probes import limit_of
from tests.support.step_workloads import WORKLOADS, setup

KEY = {"workload": "w1", "device": "NVIDIA H200", "torch": "2.12.0", "budget_bytes": None}
LIMIT = SavedLimit(micro_batch=93, date="2026-11-20")


def store(home, content):
    path = path_of(KEY, home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_limit_is_found_by_its_key_under_any_budget(tmp_path):
    assert recall(KEY, tmp_path) is None
    path = store(tmp_path, msgspec.json.encode(LIMIT))
    assert path.parent == tmp_path / "profiles" / "nvidia-h200" / "limits"
    same = {"budget_bytes": 7, **{name: value for name, value in reversed(KEY.items()) if value is not None}}
    assert recall(same, tmp_path) == LIMIT
    for other in (KEY | {"workload": "w2"}, {"device": "NVIDIA H200"}):
        assert recall(other, tmp_path) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON: "),
        (b'{"micro_batch": ' + b"9" * 5000 + b"}", "is not JSON: "),
        (b'{"micro_batch": 5, "fits": 1}', "unknown field"),
        (b'{"micro_batch": 0}', r"\$\.micro_batch"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_reason(tmp_path, caplog, content, reason):
    path = store(tmp_path, content)
    with caplog.at_level(logging.WARNING):
        assert recall(KEY, tmp_path) is None
    assert str(path) in caplog.text
    assert re.search(reason, caplog.text)


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
