"""The command line in this process: what is refused before anything is opened, and the help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autobatch.cli import main as cli
from autobatch.cli.failures import RunLog, Terminated, describe_failure
from autobatch.cli.parser import parse
from autobatch.core.errors import InputError
from autobatch.core.options import COMMANDS
from tests.support.commandline import SMALL, environment

FIT = ("fit", "--target-batch", "8")
REFUSED = [
    (("pla",), "there is no command 'pla'; did you mean plan?"),
    (("conquer",), "there is no command 'conquer'; there are: fit, plan, probe, tune"),
    (("--conquer",), "there is no option '--conquer'"),
    (("fit",), "--target-batch is needed and was not given: a whole number of 1 or more"),
    (("fit", "--target-batch"), "--target-batch is given no value"),
    (("fit", "--target-batch", "--steps", "3"), "--target-batch is given no value"),
    (("fit", "--target-batch="), "--target-batch must be a whole number of 1 or more, found ''"),
    (("fit", "--target-batch", "0"), "--target-batch must be a whole number of 1 or more, found '0'"),
    (("fit", "--target-batch", "-5"), "--target-batch must be a whole number of 1 or more, found '-5'"),
    (("fit", "--target-batch", "x"), "--target-batch must be a whole number of 1 or more, found 'x'"),
    (("plan", "--target-batch=1.5"), "--target-batch must be a whole number of 1 or more, found '1.5'"),
    (("fit", "--target-bacth", "8"), "there is no option --target-bacth; did you mean --target-batch?"),
    ((*FIT, "--frobnicate"), "there is no option --frobnicate; see --help"),
    ((*FIT, "-x"), "there is no option -x; see --help"),
    ((*FIT, "--json=yes"), "--json takes no value, found 'yes'"),
    ((*FIT, "a:b", "c:d"), "there is one WORKLOAD, and 'c:d' is one word too many"),
    ((*FIT, ""), "WORKLOAD must be module:function or path/to/file.py:function, found ''"),
    ((*FIT, "--memory-budget", "nonsense"), "--memory-budget: 'nonsense' is not a size in bytes"),
    ((*FIT, "--memory-budget", "0"), "--memory-budget: '0' is a size of 0 bytes"),
    ((*FIT, "--memory-budget", "-1"), "--memory-budget: '-1' is not a size in bytes"),
    ((*FIT, "--memory-budget", "0%"), "--memory-budget: '0%' is not a share of memory"),
    ((*FIT, "--memory-budget", "120%"), "--memory-budget: '120%' is not a share of memory"),
    ((*FIT, "--max-micro-batch", "0"), "--max-micro-batch must be a whole number of 1 or more, found '0'"),
    ((*FIT, "--precision", "fp8"), "--precision must be one of auto, fp32, bf16, fp16, found 'fp8'"),
    ((*FIT, "--device", "tpu"), "--device 'tpu' names no device: write auto, cuda, cuda:N, cpu or sim:"),
    ((*FIT, "--steps", "3", "--epochs", "2"), "--steps 3 and --epochs 2 exclude each other: give one"),
    ((*FIT, "--lr-rule", "cubic"), "--lr-rule must be one of none, linear, sqrt, found 'cubic'"),
    ((*FIT, "--keep-last", "1"), "--keep-last must be a whole number of 2 or more, found '1'"),
    ((*FIT, "--timeout", "-1"), "--timeout must be a number over 0, found '-1'"),
    ((*FIT, "--seed", "-1"), "--seed must be a whole number from 0 to 2147483647, found '-1'"),
    (("probe", "--steps", "3"), "there is no option --steps"),
    (("profiles", "shwo"), "profiles shwo: write profiles list, show NAME or save NAME"),
    (("doctor", "now"), "doctor takes no arguments, found now"),
    (("report",), "report takes one folder of a run"),
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_wrong_input_is_one_line_and_exit_2(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"autobatch: {said}")
    assert not list(tmp_path.iterdir())


def test_verbose_shows_the_traceback_besides(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*FIT, "--steps", "0", "--verbose"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("autobatch: --steps must be")
    assert "Traceback (most recent call last)" in err


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"], ["--version"]])
def test_general_questions_are_answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("autobatch 0." if words == ["--version"] else "usage: autobatch COMMAND")
    assert max(map(len, out.splitlines())) <= 80


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["--help"])
    out = capsys.readouterr().out
    for name in cli.RUNNING + cli.OTHER:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", cli.RUNNING)
def test_every_option_is_explained_within_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert "{None}" not in out
    assert "options options" not in out
    text = " ".join(out.replace("│", " ").split())
    for option in COMMANDS[name].__struct_fields__:
        word = option.replace("_", "-")
        _, found, after = text.partition(f"--{word}")
        assert found, option
        after = after.removeprefix(f", --no-{word}")
        assert len(after.split(" --")[0].split()) >= 4, option
    needed = "target_batch" in COMMANDS[name].__struct_fields__ and name != "estimate"
    assert ("(required)" in text) == needed
    assert "--target-batch INT" in text or name == "probe"


def test_the_help_says_where_a_value_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "autobatch.toml").write_text("trials = 3\n")
    with pytest.raises(SystemExit) as stop:
        parse("fit", ["--help"], folder=Path(), environ={"AUTOBATCH_TARGET_BATCH": "64"})
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not stop.value.code
    assert "(default: 3, from trials in autobatch.toml)" in text
    assert "(default: 64, from AUTOBATCH_TARGET_BATCH)" in text
    assert "(required)" not in text


def test_help_and_refusals_load_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
from autobatch.cli import main as cli
for words in (["--help"], ["--version"], ["pla"], *([name, "--help"] for name in cli.RUNNING + cli.OTHER)):
    cli.run(words)
cli.run(["fit", "--target-batch", "0"])
heavy = {"torch", "optuna", "numpy", "scipy", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


PARTS: dict[str, str] = {
    "model": "small(model=fails)",
    "data": "small(train_data=Data())",
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
    ("optimizer=lambda params, lr: None", "Workload(optimizer=…) returned a NoneType, not a torch.optim"),
    ("optimizer=lambda params, lr: torch.optim.SGD([torch.zeros(1)], lr)", "was given no parameter that"),
    (
        "schedule=lambda *_: None",
        "Workload(schedule=…) returned nothing (None), not a schedule of torch.optim",
    ),
    ("metrics=lambda *_: 3, validation_data=data(4)", "Workload(metrics=…) must return names and figures"),
    ("metrics=lambda *_: {'a': torch.zeros(2)}, validation_data=data(4)", "the figure 'a' of validation"),
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
def test_what_a_part_of_the_workload_raises_is_its_own_line(part: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="mine") as found:
        small_fit(tmp_path, PARTS[part])
    complaint = describe_failure(found.value)
    number = (
        (tmp_path / "train.py")
        .read_text()[: (tmp_path / "train.py").read_text().index("  # here")]
        .count("\n")
    )
    place = f"{tmp_path / 'train.py'}:{number + 1}"
    assert complaint.line == f"the workload's {part} raised OSError: [Errno 5] mine ({place})"
    assert (complaint.exit_code, complaint.logged) == (2, True)


@pytest.mark.usefixtures("a_path_of_its_own")
@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_a_workload_that_cannot_be_is_one_line(fields: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as found:
        small_fit(tmp_path, f"small({fields})")
    complaint = describe_failure(found.value)
    assert said in complaint.line
    assert complaint.exit_code == 2
    assert "\n" not in complaint.line


def test_every_ending_has_its_code(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for error, code, said in (
        (KeyboardInterrupt(), 130, "interrupted; nothing was trained"),
        (Terminated(), 143, "terminated; nothing was trained"),
        (SystemExit("done"), 2, "the workload called sys.exit('done')"),
        (OSError(28, "No space left on device"), 1, "the system refuses: [Errno 28] No space left on device"),
        (
            ZeroDivisionError("odd\nly"),
            1,
            "unexpected ZeroDivisionError: odd ly; this is a fault of autobatch",
        ),
    ):
        complaint = describe_failure(error)
        assert complaint.exit_code == code
        assert complaint.line.startswith(said)
        assert complaint.logged == (code in (1, 2))
    kept = describe_failure(KeyboardInterrupt(), folder=tmp_path)
    assert kept.line == f"interrupted; what was saved before is whole: {tmp_path / 'checkpoints'}"


def test_the_log_stands_in_the_folder_of_the_run_or_at_home(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "home", "autobatch fit")
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
    nowhere = RunLog(tmp_path / "file", "autobatch fit")
    assert nowhere.write(ValueError("fifth")) is None
