import msgspec
import pytest

from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.report.charts.curves import training_figure
from autobatch.report.result import load_run
from tests.support.sample_run import a_device, a_run, a_step


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


def test_the_printed_object_alone_is_enough(tmp_path):
    nothing = dict.fromkeys(("probe", "plan", "tuning", "training", "profile"))
    device = msgspec.to_builtins(a_device())
    printed = {"schema": 1, "autobatch": "0.1.0", "device": device, "something": "new"} | nothing
    write(tmp_path / "resnet", printed)
    run = load_run(tmp_path / "resnet")
    assert (run.device, run.probe, run.plan, run.training, run.metrics) == (a_device(), None, None, None, [])
    assert (run.title, run.versions) == ("resnet", {"autobatch": "0.1.0"})


def test_rows_that_cannot_be_read_are_counted(tmp_path):
    row = msgspec.json.encode(a_step(1))
    lines = [row, b"", b'{"step": 2}', b"\xff", b'{"loss": NaN}', row[:20]]
    write(tmp_path, {"device": msgspec.to_builtins(a_device())}, lines)
    run = load_run(tmp_path)
    assert run.metrics == [a_step(1)]
    assert run.notes == ["4 lines of metrics.jsonl could not be read and are left out"]


def test_rows_from_before_there_were_speeds_are_read_and_drawn(tmp_path):
    def picture(rows):
        write(tmp_path, {"device": msgspec.to_builtins(a_device())}, list(map(msgspec.json.encode, rows)))
        return training_figure(load_run(tmp_path).metrics)

    new = [msgspec.to_builtins(a_step(step, samples_per_s=1.0, items_per_s=1.0)) for step in range(1, 9)]
    old = [{k: v for k, v in row.items() if k not in ("samples_per_s", "items_per_s")} for row in new]
    assert picture(old).table == picture(new).table
    assert load_run(tmp_path).notes == []
    write(tmp_path, {"device": msgspec.to_builtins(a_device())}, list(map(msgspec.json.encode, old)))
    assert [row.samples_per_s for row in load_run(tmp_path).metrics] == [None] * 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no run in .*: cannot read result.json"),
        (b"{", "is not the result of a run"),
        (b"[]", "it holds no object"),
        (b"{}", "missing required field `device`"),
        (b'{"device": {"kind": 1}}', r"\$\.device\.kind"),
    ],
)
def test_what_is_no_run_is_said(tmp_path, content, message):
    if content is not None:
        write_atomic(tmp_path / "result.json", content)
    with pytest.raises(InputError, match=message):
        load_run(tmp_path)
