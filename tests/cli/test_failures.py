"""Failures of the command: the line, the exit code and the log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autobatch.cli.failures import RunLog, Terminated, describe_failure
from autobatch.core.errors import InputError
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
    (
        "metrics=lambda *_: 3, validation_data=data(4)",
        "Workload(metrics=…) must return a mapping of names to values",
    ),
    ("metrics=lambda *_: {'a': torch.zeros(2)}, validation_data=data(4)", "the validation metric 'a'"),
    ("loss=lambda model, batch: loss(model, batch) * float('nan')", "the workload's loss is nan"),
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
    complaint = describe_failure(found.value)
    number = (
        (tmp_path / "train.py")
        .read_text()[: (tmp_path / "train.py").read_text().index("  # here")]
        .count("\n")
    )
    place = f"{tmp_path / 'train.py'}:{number + 1}"
    whose = "train_data[0]" if part == "data" else part
    assert complaint.line == f"the workload's {whose} raised OSError: [Errno 5] mine ({place})"
    assert (complaint.exit_code, complaint.logged) == (2, True)


@pytest.mark.usefixtures("a_path_of_its_own")
@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_an_invalid_workload_is_one_line(fields: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as found:
        small_fit(tmp_path, f"small({fields})")
    complaint = describe_failure(found.value)
    assert said in complaint.line
    assert complaint.exit_code == 2
    assert "\n" not in complaint.line


def test_every_failure_has_its_message_and_exit_code(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for error, code, said in (
        (KeyboardInterrupt(), 130, f"interrupted {CONTINUES}"),
        (Terminated(), 143, f"terminated {CONTINUES}"),
        (SystemExit("done"), 2, "the workload called sys.exit('done')"),
        (
            OSError(28, "No space left on device"),
            1,
            "operating system error: No space left on device",
        ),
        (OSError(28, "No space left on device", "/x"), 1, "/x: No space left on device"),
        (
            ZeroDivisionError("odd\nly"),
            1,
            "unexpected ZeroDivisionError: odd ly; this is a bug in autobatch",
        ),
    ):
        complaint = describe_failure(error)
        assert complaint.exit_code == code
        assert complaint.line.startswith(said)
        assert complaint.logged == (code in (1, 2))
    assert describe_failure(KeyboardInterrupt(), measures=False).line == "interrupted"
    kept = describe_failure(KeyboardInterrupt(), folder=tmp_path)
    assert kept.line == f"interrupted; earlier checkpoints are intact: {tmp_path / 'checkpoints'}"


def test_the_log_is_in_the_folder_of_the_run_or_the_data_directory(tmp_path: Path) -> None:
    log = RunLog(lambda: tmp_path / "home", "autobatch fit")
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
    assert log.write(ValueError("fourth")) == at_home
    nowhere = RunLog(lambda: tmp_path / "file", "autobatch fit")
    assert nowhere.write(ValueError("fifth")) is None


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


def test_memory_that_runs_out_anywhere_is_exit_code_3() -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")):
        found = describe_failure(error)
        assert found.exit_code == 3
        assert found.line.startswith("out of memory where nothing smaller can be tried: ")
        assert "report it" not in found.line
