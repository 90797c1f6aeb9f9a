"""Files of limits that cannot be used."""

from __future__ import annotations

import logging
import re

import pytest

from autobatch.search.saved import path_of, recall

KEY = {"workload": "w1", "device": "NVIDIA H200", "torch": "2.12.0", "budget_bytes": None}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b'{"micro_batch": ' + b"9" * 5000 + b"}", "is ignored"),
        (b'{"micro_batch": 0}', r"\$\.micro_batch"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_reason(tmp_path, caplog, content, reason):
    path = path_of(KEY, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert recall(KEY, tmp_path) is None
    assert str(path) in caplog.text
    assert re.search(reason, caplog.text)
