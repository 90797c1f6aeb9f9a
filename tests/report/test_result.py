"""A run is written as JSON and read back; results are printed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from autobatch import Estimates, InputError, PlanResult, ProbeResult, Result, __version__
from autobatch.report.result import load_run
from tests.support.sample_run import a_device, a_probe, a_run, an_estimate


def test_a_whole_run_reads_back(tmp_path: Path) -> None:
    run = a_run()
    content = Result(**msgspec.structs.asdict(run)).to_json() | {"something": "new"}
    (tmp_path / "result.json").write_bytes(msgspec.json.encode(content))
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, run.metrics)))
    assert load_run(tmp_path) == run
    with pytest.raises(AttributeError, match="immutable"):
        run.device = None  # type: ignore[misc, assignment]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `device`"),
        (msgspec.json.encode({"device": a_device(), "notes": 5}), r"\$\.notes"),
        (b'{"device": ' * 100_000, "recursion"),
        (b'{"title": "\xff"}', "Invalid UTF-8"),
        (b'{"seconds": ' + b"9" * 5000 + b"}", ""),
        (b"", "truncated"),
    ],
    ids=range(8),
)
def test_a_folder_without_a_run_is_an_error(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(InputError, match=f"is not the folder of a run: .*{message}"):
        load_run(tmp_path)


def test_the_json_of_a_result_has_every_part_but_the_model() -> None:
    result = Result(device=a_device(), probe=a_probe(), profile=Path("limit.json"), model=object())
    found = result.to_json()
    assert (found["schema"], found["autobatch"]) == (3, __version__)
    assert (found["profile"], found["probe"]["micro_batch"], found["plan"]) == ("limit.json", 93, None)
    assert not {"model", "metrics", "notes"} & found.keys()
    assert result.to_json("device", "probe").keys() == {"schema", "autobatch", "device", "probe"}


def test_results_are_printed_as_a_summary_and_represented_in_one_line() -> None:
    run, device = a_run(), a_device()
    result = Result(device=device, probe=run.probe, plan=run.plan, training=run.training)
    plan = PlanResult(**msgspec.structs.asdict(run.plan), device=device, probe=run.probe, notes=["a remark"])
    probe = ProbeResult(**msgspec.structs.asdict(a_probe()), device=device)
    estimates = Estimates(estimates=[an_estimate()], notes=["no GPU was used"])
    fits = "fits       93 samples at a time in 6.00 GiB; 94 ran and do not"
    assert str(result).splitlines()[0] == str(probe) == fits
    assert str(plan).splitlines()[2:] == ["note: a remark"]
    assert str(estimates).splitlines()[-1] == "note: no GPU was used"
    assert repr(estimates) == "<Estimates: 90 on rtx-4090>"
    for found in (result, plan, probe, estimates):
        assert len(repr(found)) < 160
        assert "\n" not in repr(found)
