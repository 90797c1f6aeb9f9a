"""What fitted is remembered: confirmed by one run, and never taken for the answer to another question."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.core.units import GiB
from autobatch.probing import questions
from autobatch.probing.cache import CachedLimit, StaleEntry, lookup, store
from tests.support.probes import WIDTH, amsgrad, mlp, probed, work


def saved_files(home: Path) -> list[Path]:
    return sorted((home / "profiles").glob("*/limits/*.json"))


def test_a_second_probe_confirms_with_one_run(own_home: Path) -> None:
    first, _ = probed(work())
    second, listener = probed(work())
    assert (len(listener.sizes), second.probe.micro_batch) == (1, first.probe.micro_batch)
    assert second.probe.source.startswith("saved 2")
    assert first.profile == second.profile == saved_files(own_home)[0]
    assert listener.notes == [line for line in listener.notes if "saved" not in line]


def of_length(length: int) -> dict:
    return {
        "train_data": TensorDataset(torch.ones(300, length, WIDTH), torch.zeros(300, dtype=torch.int64)),
        "loss": lambda model, batch: functional.cross_entropy(model(batch[0]).mean(dim=1), batch[1]),
    }


@pytest.mark.parametrize(
    ("field", "before", "after"),
    [
        ("model", {}, {"model": lambda: mlp(65)}),
        ("optimizer", {}, {"optimizer": amsgrad}),
        ("samples", of_length(5), of_length(7)),
    ],
    ids=["model", "optimizer", "length"],
)
def test_a_changed_workload_is_probed_anew_and_the_field_is_named(field, before, after) -> None:
    probed(work(**before))
    result, listener = probed(work(**after))
    assert result.probe.source == "search"
    assert any(f"stale: {field} " in line and "probing again" in line for line in listener.notes)


def test_another_torch_is_named(monkeypatch) -> None:
    probed(work())
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    result, listener = probed(work())
    assert result.probe.source == "search"
    assert any("torch " in line and "→ 9.9.9" in line for line in listener.notes)


@pytest.mark.parametrize("options", [{"memory_budget": "100KiB"}, {"precision": "bf16"}])
def test_another_question_is_another_answer(options: dict) -> None:
    first, _ = probed(work())
    second, _ = probed(work(), **options)
    assert second.probe.source == "search"
    again, listener = probed(work())
    assert again.probe.micro_batch == first.probe.micro_batch
    assert len(listener.sizes) == 1, "the first answer is kept beside the second"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x00" * 40, b'{"schema": 99}', b"[1]", b'{"micro_batch": -1}']
)
def test_a_file_that_cannot_be_read_is_no_answer(content: bytes, own_home: Path) -> None:
    first, _ = probed(work())
    (file,) = saved_files(own_home)
    file.write_bytes(content)
    second, _ = probed(work())
    assert (second.probe.source, second.probe.micro_batch) == ("search", first.probe.micro_batch)


def edited(file: Path, **fields) -> None:
    content = json.loads(file.read_bytes()) | fields
    file.write_text(json.dumps(content))
    assert set(content) <= set(CachedLimit.__struct_fields__)


def test_an_answer_that_fits_no_more_is_searched_anew(own_home: Path) -> None:
    first, _ = probed(work())
    (file,) = saved_files(own_home)
    edited(file, micro_batch=500)
    second, listener = probed(work())
    assert listener.sizes[0] == 500
    assert any("500 no longer fits" in line for line in listener.notes)
    assert (second.probe.source, second.probe.micro_batch) == ("search", first.probe.micro_batch)
    assert json.loads(file.read_bytes())["micro_batch"] == first.probe.micro_batch


@pytest.mark.parametrize("device", ["cpu", "sim:t4"])
def test_a_cached_limit_below_the_truth_is_searched_anew(device: str, own_home: Path) -> None:
    """The run of the cached size fits, and says nothing about the next one."""
    asked = {"device": device, "memory_budget": "80KiB" if device == "cpu" else "4MiB"}
    workload = work() if device == "cpu" else work(lambda: mlp(4096))
    first, _ = probed(workload, **asked)
    (file,) = saved_files(own_home)
    for wrong in (2, first.probe.micro_batch - 1):
        edited(file, micro_batch=wrong)
        second, listener = probed(workload, **asked)
        assert listener.sizes[0] == wrong
        assert any(f"more than the saved micro-batch of {wrong} seems" in line for line in listener.notes)
        assert (second.probe.source, second.probe.micro_batch) == ("search", first.probe.micro_batch)
        assert json.loads(file.read_bytes())["micro_batch"] == first.probe.micro_batch
    again, listener = probed(workload, **asked)
    assert (again.probe.micro_batch, listener.sizes) == (first.probe.micro_batch, [first.probe.micro_batch])


def test_without_a_trace_the_peak_decides_about_a_cached_limit(monkeypatch, own_home: Path) -> None:
    """As on a GPU: 2 for a limit of many leaves most of the budget, and the limit itself does not."""
    monkeypatch.setattr(questions, "trace", lambda process: None)
    first, _ = probed(work())
    again, listener = probed(work())
    assert again.probe.source.startswith("saved 2")
    assert listener.sizes == [first.probe.micro_batch]
    (file,) = saved_files(own_home)
    edited(file, micro_batch=2)
    second, listener = probed(work())
    assert (second.probe.source, second.probe.micro_batch) == ("search", first.probe.micro_batch)


def test_a_larger_cap_than_the_saved_one_is_another_question() -> None:
    small, _ = probed(work(), max_micro_batch=3)
    large, listener = probed(work(), max_micro_batch=5)
    assert (small.probe.micro_batch, large.probe.micro_batch) == (3, 5)
    assert large.probe.source == "search"
    free, _ = probed(work())
    assert free.probe.limited_by == "memory"
    capped, listener = probed(work(), max_micro_batch=4)
    assert (capped.probe.micro_batch, capped.probe.limited_by) == (4, "max_micro_batch")
    assert listener.sizes == [4]


def test_asking_for_one_size_forgets_nothing() -> None:
    first, _ = probed(work())
    probed(work(), micro_batch=2)
    again, listener = probed(work())
    assert (again.probe.micro_batch, len(listener.sizes)) == (first.probe.micro_batch, 1)


def test_a_home_that_cannot_be_written_is_a_note(own_home: Path) -> None:
    own_home.parent.mkdir(parents=True, exist_ok=True)
    own_home.write_text("a file where the folder should be")
    result, listener = probed(work())
    assert result.probe.micro_batch > 1
    assert result.profile is None
    assert any("the limit was not saved" in line for line in listener.notes)


def a_limit(**changes):
    key = {
        "workload": "w1",
        "device": "NVIDIA H200",
        "total_bytes": 80 * GiB,
        "torch": "2.12.0",
        "budget": None,
    }
    return CachedLimit(
        key=key | changes, micro_batch=93, limited_by="memory", upper_bound_by="run", date="2026-11-20"
    )


def test_a_limit_is_recalled_by_its_exact_key(tmp_path):
    limit = a_limit()
    assert lookup(limit.key, tmp_path) is None
    path = store(limit, tmp_path)
    assert path.parent == tmp_path / "profiles" / "nvidia-h200" / "limits"
    assert lookup(dict(reversed(limit.key.items())), tmp_path) == limit
    assert lookup({name: value for name, value in limit.key.items() if value is not None}, tmp_path) == limit


def test_a_second_limit_of_a_key_takes_the_place_of_the_first(tmp_path):
    store(a_limit(), tmp_path)
    smaller = msgspec.structs.replace(a_limit(), micro_batch=64)
    store(smaller, tmp_path)
    assert lookup(smaller.key, tmp_path) == smaller
    assert len(list((tmp_path / "profiles").rglob("*.json"))) == 1


def test_a_stale_limit_names_what_changed(tmp_path):
    store(a_limit(torch="2.11.0", device="NVIDIA A10"), tmp_path)
    store(a_limit(), tmp_path)
    found = lookup(a_limit(torch="2.13.0", budget=6 * GiB).key, tmp_path)
    assert isinstance(found, StaleEntry)
    assert [(c.field, c.old, c.new) for c in found.changed] == [
        ("budget", None, 6 * GiB),
        ("torch", "2.12.0", "2.13.0"),
    ]
    assert str(found) == (
        "the limit saved on 2026-11-20 is stale: budget none → 6442450944, torch 2.12.0 → 2.13.0"
    )


def test_a_stale_limit_shows_no_digests(tmp_path):
    store(a_limit(model="0123456789abcdef"), tmp_path)
    assert str(lookup(a_limit(model="fedcba9876543210").key, tmp_path)).endswith("is stale: model changed")


def test_among_equally_near_limits_the_newest_is_told(tmp_path):
    for day, version in (("2026-11-19", "2.10.0"), ("2026-11-21", "2.12.0"), ("2026-11-20", "2.11.0")):
        store(msgspec.structs.replace(a_limit(torch=version), date=day), tmp_path)
    assert lookup(a_limit(torch="2.13.0").key, tmp_path).limit.date == "2026-11-21"


def test_another_workload_is_nothing(tmp_path):
    store(a_limit(), tmp_path)
    assert lookup(a_limit(workload="w2").key, tmp_path) is None
    assert lookup({"device": "NVIDIA H200"}, tmp_path) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[1]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b'{"schema": 3, "fits": 1}', "schema 3, this autobatch reads 2"),
        (b'{"schema": 1}', "missing required field"),
        (b'{"key": {"workload": 1.5}}', r"\$\.key"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_reason_and_kept(tmp_path, caplog, content, reason):
    path = store(a_limit(), tmp_path)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert lookup(a_limit().key, tmp_path) is None
    assert str(path) in caplog.text
    assert path.read_bytes() == content
    assert re.search(reason, caplog.text)


def test_a_file_under_a_wrong_name_is_not_taken_for_the_key(tmp_path):
    path = store(a_limit(), tmp_path)
    path.write_bytes(msgspec.json.encode(a_limit(torch="2.1.0")))
    assert isinstance(lookup(a_limit().key, tmp_path), StaleEntry)


def test_a_data_directory_that_is_not_writable_is_named(tmp_path):
    home = write_atomic(tmp_path / "file", b"") / "home"  # below a file, where even root cannot write
    with pytest.raises(InputError, match=rf"cannot save the limit at .*{home.name}.*AUTOBATCH_HOME"):
        store(a_limit(), home)
