"""What users rely on: the keys of the JSON, the exit codes and built-in bases of errors, the version."""

from __future__ import annotations

import importlib.metadata
import pickle
import platform
import tomllib
from pathlib import Path

import msgspec
import pytest

import autobatch
from autobatch import Plan, Probe, Training
from autobatch.cli.main import run
from autobatch.core import errors, records, version
from autobatch.core.records import Attempt, DeviceRecord, Estimate, Record, RunRecord, Tuning
from tests.support.sample_run import a_device, a_run

KINDS = {kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, Record)}


KEYS: dict[type[Record], str] = {
    DeviceRecord: "budget_bytes kind name other_processes_bytes total_bytes",
    Estimate: (
        "budget_bytes micro_batch micro_batch_high micro_batch_low peak_allocated_bytes "
        "peak_reserved_bytes plan profile seconds"
    ),
    Plan: (
        "accumulation_steps base_batch effective_batch learning_rate learning_rate_rule "
        "micro_batch micro_batches precision target_batch world_size"
    ),
    Probe: "attempts limited_by micro_batch oom_count predicted_micro_batch upper_bound_by",
    Attempt: "fits micro_batch peak_allocated_bytes peak_reserved_bytes seconds",
    Training: (
        "checkpoint final_loss first_loss oom_recoveries optimizer_steps resumed_from samples samples_per_s"
    ),
    Tuning: "baseline_samples_per_s best best_samples_per_s study trials",
}


def test_records_are_immutable_and_keyword_only() -> None:
    assert len(KINDS) > 15
    assert all(kind.__struct_config__.frozen for kind in KINDS)
    with pytest.raises(AttributeError, match="immutable"):
        a_device().kind = "cpu"
    with pytest.raises(TypeError):
        RunRecord(a_device())  # type: ignore[misc]


@pytest.mark.parametrize("kind", KEYS)
def test_a_record_has_the_keys_of_the_contract(kind: type[Record]) -> None:
    assert set(KEYS[kind].split()) <= set(kind.__struct_fields__)


def test_a_run_is_the_same_after_a_trip_through_json() -> None:
    run = a_run()
    assert msgspec.json.decode(msgspec.json.encode(run), type=RunRecord) == run
    text = msgspec.json.encode(a_run(training=None)).decode()
    assert '"training":null' in text


ERRORS: dict[str, tuple[type[Exception], int]] = {
    "AutobatchError": (Exception, 1),
    "InputError": (ValueError, 2),
    "UserCodeError": (errors.InputError, 2),
    "DoesNotFitError": (RuntimeError, 3),
    "RestartSmallerError": (RuntimeError, 77),
    "CheckpointError": (OSError, 1),
    "NonFiniteError": (ArithmeticError, 1),
}


def test_every_error_has_its_base_and_exit_code_and_survives_a_pickle() -> None:
    kinds = {name for name, one in vars(errors).items() if isinstance(one, type)}
    assert kinds == {*ERRORS, "Interrupted"}
    assert all(name in (errors.__doc__ or "") for name in kinds)
    for name, (base, code) in ERRORS.items():
        error = getattr(errors, name)("one line")
        assert isinstance(error, base)
        assert (error.exit_code, str(pickle.loads(pickle.dumps(error)))) == (code, "one line")
    codes = [errors.Interrupted("stopped", signal_number=number).exit_code for number in (2, 15)]
    assert codes == [130, 143]


def test_the_build_the_package_and_the_command_have_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "autobatch/core/version.py"
    assert version.versions() == {
        "autobatch": autobatch.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"autobatch {autobatch.__version__}\n"
