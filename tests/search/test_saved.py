"""Limits that are kept, and the programs of their steps beside them."""

from __future__ import annotations

import logging
import re

import msgspec
import pytest

from autobatch.search.saved import SavedLimit, path_of, recall

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
