"""Whole probes after one another: a saved limit is confirmed by one run, or probed again with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autobatch.search.probe import SavedLimit
from tests.support.probes import probed, work
from tests.support.training import amsgrad


def saved_files(home: Path) -> list[Path]:
    return sorted((home / "profiles").glob("*/limits/*.json"))


def test_a_second_probe_of_the_same_confirms_the_saved_limit_with_one_run(own_home: Path) -> None:
    first, _ = probed(work())
    (file,) = saved_files(own_home)
    assert probed(work(optimizer=amsgrad))[0].probe.source == "search"
    assert probed(work(), precision="bf16")[0].probe.source == "search"
    second, listener = probed(work())
    assert (len(listener.sizes), second.probe.micro_batch) == (1, first.probe.micro_batch)
    assert second.probe.source.startswith("saved 2")
    assert first.profile == second.profile == file
    assert listener.notes == [line for line in listener.notes if "saved" not in line]
    other, listener = probed(work(), memory_budget="120KiB")
    assert (len(listener.sizes), other.probe.upper_bound_by) == (1, "replay"), "under another budget, too"


def test_a_saved_limit_that_no_longer_fits_is_probed_again(own_home: Path) -> None:
    first, _ = probed(work())
    (file,) = saved_files(own_home)
    content = json.loads(file.read_bytes()) | {"micro_batch": 500, "programs": []}
    assert set(content) <= set(SavedLimit.__struct_fields__)
    file.write_text(json.dumps(content))
    second, listener = probed(work())
    assert listener.sizes[0] == 500
    assert any("500 no longer fit" in line for line in listener.notes)
    assert (second.probe.source, second.probe.micro_batch) == ("search", first.probe.micro_batch)
    assert json.loads(file.read_bytes())["micro_batch"] == first.probe.micro_batch


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "truncated"), (b'{"micro_batch": ' + b"9" * 5000 + b"}", ""), (b'{"micro_batch": 0}', "$.micro")],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_reason(
    own_home: Path, caplog: pytest.LogCaptureFixture, content: bytes, reason: str
) -> None:
    first, _ = probed(work())
    (file,) = saved_files(own_home)
    file.write_bytes(content)
    second, _ = probed(work())
    assert (second.probe.source, second.probe.micro_batch) == ("search", first.probe.micro_batch)
    assert f"the saved limit {file} is ignored" in caplog.text
    assert reason in caplog.text


def test_a_limit_that_cannot_be_saved_is_noted(own_home: Path) -> None:
    own_home.parent.mkdir(parents=True, exist_ok=True)
    own_home.write_text("a file where the folder should be")
    result, listener = probed(work())
    assert result.probe.micro_batch > 1
    assert result.profile is None
    assert any("the limit was not saved" in line for line in listener.notes)
