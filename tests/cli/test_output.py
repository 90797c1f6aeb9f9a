"""Output of the command: streams that survive their reader, and failures as a line, a code and a log."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autobatch import InputError
from autobatch.cli.output import RunLog, SafeStream, Terminated, describe_failure, reserve_stdout
from tests.support.commandline import SMALL

PARTS: dict[str, str] = {
    "model": "small(model=fails)",
    "train_data[0]": "small(train_data=Data())",
    "collate": "small(collate=fails)",
    "size_of": "small(size_of=fails)",
    "loss": "small(loss=fails)",
    "backward pass of its loss": "small(loss=lambda model, batch: Fails.apply(loss(model, batch)))",
    "optimizer": "small(optimizer=lambda params, learning_rate: Stuck(params, lr=learning_rate))",
    "schedule": "small(schedule=fails)",
    "metrics": "small(metrics=fails, validation_data=data(4))",
}
WRONG: list[tuple[str, str]] = [
    ("model=lambda: 3", "Workload(model=…) returned a int, not a torch.nn.Module"),
    (
        "optimizer=lambda params, lr: None",
        "Workload(optimizer=…) must return a torch.optim.Optimizer or a list",
    ),
    (
        "optimizer=lambda params, lr: torch.optim.SGD([torch.zeros(1)], lr)",
        "that requires a gradient, found 0 of 1",
    ),
    (
        "schedule=lambda *_: None",
        "Workload(schedule=…) must return a schedule of torch.optim, found nothing (None)",
    ),
    ("loss=lambda model, batch: model(batch[0])", "must return a 0-d tensor or a Loss, found a tensor of"),
    ("loss=lambda model, batch: 3.0", "must return a 0-d tensor or a Loss, found a float"),
    ("train_data=[torch.zeros(n) for n in range(1, 9)]", "the samples cannot be collated"),
]
BROKEN = """
def fails(*_):
    raise OSError(5, "mine")  # here

class Data(list):
    __len__ = lambda self: 4
    __getitem__ = fails

class Fails(torch.autograd.Function):
    forward = staticmethod(lambda ctx, loss: loss.clone())
    backward = staticmethod(fails)

class Stuck(torch.optim.SGD):
    step = fails
"""

CONTINUES = "before training; limits and trials so far are saved, and the same command continues with them"


def small_fit(folder: Path, expression: str) -> Any:
    """Train a workload here, as a library call does."""
    import autobatch

    path = folder / "train.py"
    path.write_text(f"{SMALL}{BROKEN}\ndef made():\n    return {expression}\n")
    sys.modules.pop("train", None)
    options = {"target_batch": 4, "steps": 2, "trials": 0, "memory_budget": "64MiB", "device": "cpu"}
    return autobatch.fit(f"{path}:made", out=folder / "out", **options)


@pytest.fixture
def a_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.mark.usefixtures("a_path_of_its_own")
@pytest.mark.parametrize("part", PARTS)
def test_an_error_in_the_workload_names_its_part_and_its_line(part: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="mine") as found:
        small_fit(tmp_path, PARTS[part])
    report = describe_failure(found.value)
    number = (
        (tmp_path / "train.py")
        .read_text()[: (tmp_path / "train.py").read_text().index("  # here")]
        .count("\n")
    )
    place = f"{tmp_path / 'train.py'}:{number + 1}"
    whose = "train_data[0]" if part == "data" else part
    assert report.line == f"the workload's {whose} raised OSError: [Errno 5] mine ({place})"
    assert (report.exit_code, report.is_logged) == (2, True)


@pytest.mark.usefixtures("a_path_of_its_own")
@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_an_invalid_workload_is_one_line(fields: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as found:
        small_fit(tmp_path, f"small({fields})")
    report = describe_failure(found.value)
    assert said in report.line
    assert report.exit_code == 2
    assert "\n" not in report.line


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, f"interrupted {CONTINUES}"),
        (Terminated(), 143, f"terminated {CONTINUES}"),
        (SystemExit("done"), 2, "the workload called sys.exit('done')"),
        (OSError(28, "No space left on device"), 1, "operating system error: No space left on device"),
        (OSError(28, "No space left on device", "/x"), 1, "/x: No space left on device"),
        (ZeroDivisionError("odd\nly"), 1, "unexpected ZeroDivisionError: odd ly; this is a bug in autobatch"),
        (MemoryError(), 3, "out of memory where nothing smaller can be tried: MemoryError: ; free memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            3,
            "out of memory where nothing smaller can be tried: ",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_has_its_message_and_exit_code(error: BaseException, code: int, said: str) -> None:
    report = describe_failure(error)
    assert report.exit_code == code
    assert report.line.startswith(said)
    assert report.is_logged == (code < 100)


def test_an_interruption_names_what_it_left_behind(tmp_path: Path) -> None:
    assert describe_failure(KeyboardInterrupt(), measures=False).line == "interrupted"
    (tmp_path / "checkpoints").mkdir()
    kept = describe_failure(KeyboardInterrupt(), folder=tmp_path)
    assert kept.line == f"interrupted; earlier checkpoints are intact: {tmp_path / 'checkpoints'}"


def test_the_log_is_in_the_folder_of_the_run_or_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    log = RunLog("autobatch fit")
    at_home = log.write(ValueError("first"))
    assert at_home is not None
    assert at_home.parent == tmp_path / "home" / "logs"
    assert "autobatch fit" in at_home.read_text()
    assert "ValueError: first" in at_home.read_text()
    log.enter(tmp_path / "run")
    for text in ("second", "third"):
        assert log.write(ValueError(text)) == tmp_path / "run" / "run.log"
    assert (tmp_path / "run" / "run.log").read_text().count("ValueError: ") == 2
    (tmp_path / "file").write_text("")
    log.enter(tmp_path / "file")
    found = log.write(ValueError("fourth"))
    assert found is not None
    assert found.parent == at_home.parent
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "file"))
    assert log.write(ValueError("fifth")) is None


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InputError("\x1b[31mred\x9b2J"), r"\x1b[31mred\x9b2J"),
        (InputError("x" * 100_000), "xxx … xxx"),
        (RuntimeError("\x1b]0;title\x07"), r"unexpected RuntimeError: \x1b]0;title\x07; this is a bug"),
        (RuntimeError("x" * 100_000), "; this is a bug in autobatch, please report it"),
        (Silent(), "unexpected Silent: ; this is a bug"),
        (OSError(28, "No space left\x1b[31m", "a\nb\x1b"), r"a b\x1b: No space left\x1b[31m"),
        (SystemExit("\x1b" + "x" * 100_000), "the workload called sys.exit('"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_is_one_short_line_without_control_characters(error: BaseException, said: str) -> None:
    line = describe_failure(error).line
    assert said in line
    assert line.isprintable()
    assert len(line) <= 2000


class Breaking(io.StringIO):
    """A stream that fails from the second write on."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        if self.writes > 1:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_text_after_a_failure_is_dropped_and_the_failure_is_kept() -> None:
    inner = Breaking()
    stream = SafeStream(inner)
    assert [stream.write(text) for text in ("one", "two", "three")] == [3, 3, 5]
    stream.flush()
    assert inner.getvalue() == "one"
    assert inner.writes == 2, "nothing is tried after the failure"
    assert isinstance(stream.failure, BrokenPipeError)


def test_a_flush_that_fails_is_kept_too_and_all_else_is_that_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise OSError(28, "No space left on device")

    inner = Breaking()
    stream = SafeStream(inner)
    monkeypatch.setattr(inner, "flush", fails)
    stream.flush()
    assert stream.failure is not None
    assert stream.failure.errno == 28
    assert stream.write("dropped") == 7
    assert inner.getvalue() == ""
    assert (stream.isatty(), stream.encoding) == (False, "utf-8")


MIXED = """
import os, subprocess
from autobatch.cli.output import reserve_stdout
with reserve_stdout():
    print("python", flush=True)
    os.write(1, b"system\\n")
    subprocess.run(["echo", "child"], check=True)
print("after")
"""


def test_all_output_goes_to_standard_error_within_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", MIXED], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("after\n", "python\nsystem\nchild\n")


def test_captured_output_is_redirected_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as captured, reserve_stdout():
        sys.stdout.write("text")
    assert captured.getvalue() == ""
    assert capsys.readouterr().err == "text"
