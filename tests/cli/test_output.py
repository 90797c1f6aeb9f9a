"""Output of the command: streams that survive their reader, and failures as a line, a code and a log."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import autobatch
from autobatch import InputError
from autobatch.cli import main as cli
from autobatch.cli.output import SafeStream, Terminated, describe_failure
from tests.support.commandline import SMALL

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
PARTS: dict[str, str] = {
    "model": "small(model=fails)",
    "train_data[0]": "small(train_data=Data())",
    "collate": "small(collate=fails)",
    "loss": "small(loss=fails)",
    "backward pass of its loss": "small(loss=lambda model, batch: Fails.apply(loss(model, batch)))",
    "optimizer": "small(optimizer=lambda params, learning_rate: Stuck(params, lr=learning_rate))",
    "metrics": "small(metrics=fails, validation_data=data(4))",
}
WRONG: dict[str, str] = {
    "small(model=lambda: 3)": "Workload(model=…) returned a int, not a torch.nn.Module",
    "small(optimizer=lambda params, lr: None)": "Workload(optimizer=…) must return a torch.optim.Optimizer",
    "small(schedule=lambda optimizer, steps: None)": "Workload(schedule=…) must return a schedule",
    "small(counts=lambda batch: 'none')": "counts=… must return a mapping of the names of terms",
}


@pytest.fixture(autouse=True)
def a_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.mark.parametrize(("made", "said"), [*((PARTS[part], part) for part in PARTS), *WRONG.items()])
def test_an_error_in_the_workload_is_one_line_that_names_its_part(
    made: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}{BROKEN}\ndef made():\n    return {made}\n")
    sys.modules.pop("train", None)
    options: dict[str, Any] = {"target_batch": 4, "steps": 2, "trials": 0, "memory_budget": "64MiB"}
    with pytest.raises((OSError, InputError)) as found:
        autobatch.fit(f"{path}:made", out=tmp_path / "out", device="cpu", **options)
    report = line, code, _ = describe_failure(found.value)
    if said in PARTS:
        number = path.read_text().partition("  # here")[0].count("\n") + 1
        assert report == (f"the workload's {said} raised OSError: [Errno 5] mine ({path}:{number})", 2, True)
    else:
        assert (said in line, code, line.count("\n")) == (True, 2, 0)


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; what was saved"),
        (Terminated(), 143, "terminated; what was saved"),
        (SystemExit("\x1b" + "x" * 100_000), 2, "the workload called sys.exit('"),
        (OSError(28, "No space left on device"), 1, "operating system error: No space left on device"),
        (OSError(28, "No space left\x1b[31m", "a\nb\x1b"), 1, r"a b\x1b: No space left\x1b[31m"),
        (ZeroDivisionError("odd\nly"), 1, "unexpected ZeroDivisionError: odd ly; this is a bug in autobatch"),
        (MemoryError(), 3, "out of memory where nothing smaller can be tried: MemoryError"),
        (InputError("\x1b[31mred\x9b2J" + "x" * 100_000), 2, r"\x1b[31mred\x9b2J"),
        (Silent(), 1, "unexpected Silent: ; this is a bug in autobatch, please report it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_has_its_message_and_exit_code(error: BaseException, code: int, said: str) -> None:
    line, *rest = describe_failure(error)
    assert rest == [code, code < 100 and not isinstance(error, InputError)]
    assert line.startswith(said)
    assert line.isprintable()
    assert len(line) <= 2000


@pytest.fixture
def broken_pipe() -> Iterator[SafeStream]:
    """Return a stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield SafeStream(stream)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_text_that_cannot_be_written_is_dropped_and_a_failure_is_kept(broken_pipe: SafeStream) -> None:
    with Path("/dev/full").open("w") as full:
        for stream, is_kept in ((broken_pipe, False), (SafeStream(full), True)):
            assert [stream.write(text) for text in ("one", "two")] == [3, 3]
            assert (stream.failure is not None) == is_kept


def test_json_is_written_also_if_nobody_reads_the_rest(
    broken_pipe: SafeStream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    monkeypatch.setattr(sys, "stderr", broken_pipe)
    assert cli.run(["estimate", str(tmp_path / "small.py"), "--profile", "t4", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["estimates"][0]["profile"] == "t4"
