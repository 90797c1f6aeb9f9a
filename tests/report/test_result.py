"""A run is written as JSON and read back."""

import os
from pathlib import Path

import msgspec
import pytest

from autobatch import Estimates, InputError, PlanResult, Result, __version__
from autobatch.core.files import write_atomic
from autobatch.report.result import find_run, load_run
from tests.support.sample_run import a_device, a_probe, a_run, a_step, an_estimate


def write(folder, result, lines=None):
    write_atomic(folder / "result.json", msgspec.json.encode(result))
    if lines is not None:
        write_atomic(folder / "metrics.jsonl", b"\n".join(lines))


def test_a_whole_run_reads_back(tmp_path):
    run = a_run()
    result = msgspec.to_builtins(run)
    lines = [msgspec.json.encode(record) for record in run.metrics]
    write(tmp_path, {"schema": 1, "autobatch": "0.1.0", **result, "metrics": None}, lines)
    assert load_run(tmp_path) == run


def test_the_printed_object_can_be_read_back(tmp_path):
    nothing = dict.fromkeys(("probe", "plan", "tuning", "training", "profile"))
    device = msgspec.to_builtins(a_device())
    printed = {"schema": 1, "autobatch": "0.1.0", "device": device, "something": "new"} | nothing
    write(tmp_path / "resnet", printed)
    run = load_run(tmp_path / "resnet")
    assert (run.device, run.probe, run.plan, run.training, run.metrics) == (a_device(), None, None, None, [])
    assert (run.title, run.versions) == ("resnet", {"autobatch": "0.1.0"})


def test_unreadable_rows_are_left_out_and_counted(tmp_path):
    row = msgspec.json.encode(a_step(1))
    lines = [row, b"", b'{"step": 2}', b"\xff", b'{"loss": NaN}', row[:20]]
    write(tmp_path, {"device": msgspec.to_builtins(a_device())}, lines)
    run = load_run(tmp_path)
    assert run.metrics == [a_step(1)]
    assert run.notes == ["left out 4 unreadable lines of metrics.jsonl"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"result\.json cannot be read: No such file .*\. Give the folder of a run"),
        (b"{", r"result\.json is not JSON: .*\. Give the folder of a run"),
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "missing required field `device`"),
        (b'{"device": {"kind": 1}}', r"\$\.device\.kind"),
        (msgspec.json.encode({"device": a_device(), "notes": 5}), r"\$\.notes"),
        (b'{"device": ' * 100_000, "is not JSON: "),
        (b'{"checkpoints": [' + b"9" * 5000 + b"]}", "is not JSON: "),
        (b'{"checkpoints": [NaN]}', "is not JSON: "),
    ],
)
def test_a_folder_without_a_run_is_an_error(tmp_path, content, message):
    if content is not None:
        write_atomic(tmp_path / "result.json", content)
    with pytest.raises(InputError, match=message):
        load_run(tmp_path)


def test_the_json_of_a_result_has_every_part_but_the_model():
    result = Result(device=a_device(), probe=a_probe(), profile=Path("limit.json"), model=object())
    found = result.to_json()
    assert (found["schema"], found["autobatch"]) == (3, __version__)
    assert found["profile"] == "limit.json"
    assert found["probe"]["micro_batch"] == 93
    assert found["plan"] is None
    assert not {"model", "metrics", "notes"} & found.keys()
    assert result.to_json("device", "probe").keys() == {"schema", "autobatch", "device", "probe"}


def put(folder: Path, seconds: int, title: str = "digits") -> Path:
    """Write a run, finished that long after the first ones."""
    write(folder, {"device": msgspec.to_builtins(a_device()), "title": title})
    os.utime(folder / "result.json", (seconds, seconds))
    return folder


def test_the_newest_run_directly_in_a_folder_is_found(tmp_path: Path) -> None:
    one, two = put(tmp_path / "a" / "1", 1), put(tmp_path / "a" / "2", 2)
    for number, nested in enumerate(("a/1/previous-1", "a/previous-1", "a/x/deep", "other/3"), 3):
        put(tmp_path / nested, number)
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "other" / "3")
    (tmp_path / "a" / "latest").symlink_to("1")
    assert find_run(tmp_path / "a") == two
    assert find_run(one) == one
    (tmp_path / "door").symlink_to(one)
    assert find_run(tmp_path / "door") == tmp_path / "door", "a link that is asked for is the run"
    assert find_run(one / "result.json") == one
    for nowhere in (tmp_path, tmp_path / "nowhere", one / "report.html"):
        with pytest.raises(InputError, match=r"no run in .* or in a folder directly in it: give the folder"):
            find_run(nowhere)
    with pytest.raises(InputError, match=r"cannot look for a run in .*: File name too long"):
        find_run(tmp_path / ("x" * 5000))


def test_results_are_printed_as_a_summary_and_represented_in_one_line() -> None:
    run = a_run()
    result = Result(device=run.device, probe=run.probe, plan=run.plan, training=run.training)
    assert str(result).splitlines()[0].startswith("fits       93 samples at a time in 6.00 GiB")
    fields = {name: getattr(run.plan, name) for name in run.plan.__struct_fields__}
    plan = PlanResult(**fields, device=run.device, probe=run.probe)
    assert plan.plan.target_batch == plan.target_batch == 1024
    assert str(plan).splitlines()[1] == (
        "plan       batch 1,024 in 12 micro-batches (4 × 86, 8 × 85) · bf16 · lr 0.0003"
    )
    estimates = Estimates(estimates=[an_estimate()], notes=["no GPU was used"])
    assert str(estimates).splitlines() == [
        "rtx-4090: 90 samples at a time in 22.0 GiB (bf16), batch 1,024 in 12 micro-batches (4 × 86, 8 × 85)",
        "no GPU was used",
    ]
    for one in (result, plan, estimates):
        assert len(repr(one)) < 160
        assert "\n" not in repr(one)
