"""Standard output: a stream that survives its reader, and output reserved for JSON."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from autobatch.cli.output import SafeStream, reserve_stdout


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


def test_a_flush_that_fails_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError(28, "No space left on device")

    inner = io.StringIO()
    stream = SafeStream(inner)
    monkeypatch.setattr(inner, "flush", fails)
    stream.flush()
    assert stream.failure is not None
    assert stream.failure.errno == 28
    assert stream.write("dropped") == 7
    assert inner.getvalue() == ""


def test_a_safe_stream_has_the_properties_of_its_stream() -> None:
    stream = SafeStream(Breaking())
    assert (stream.isatty(), stream.encoding) == (False, "utf-8")
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()


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
