"""The data sheet of a GPU and its TOML file: the shipped files, and files that are invalid."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from autobatch import InputError
from autobatch.core.files import write_atomic
from autobatch.core.units import GiB, MiB
from autobatch.device.profiles import Figure, HardwareProfile, format_profile, read_profile
from tests.support.hardware import a_profile

SHIPPED = sorted((Path(__file__).parents[2] / "profiles").glob("*.toml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_profile_is_whole_and_sane(file):
    profile = read_profile(file)
    assert profile.name == file.stem
    assert format_profile(profile) == file.read_text(encoding="utf-8"), "not in the canonical form"
    assert profile.compute_capability >= (7, 0)
    assert 8 * GiB < profile.total_bytes < 256 * GiB
    assert profile.nvml_total is None or profile.nvml_total.value > profile.total_bytes
    assert profile.context_bytes is None or 64 * MiB < profile.context_bytes < 2 * GiB
    assert profile.workspaces == (32 * MiB if profile.compute_capability >= (9, 0) else 8519680, 2)
    figures = [value for value in tomllib.loads(file.read_text()).values() if isinstance(value, dict)]
    assert len(figures) >= 4
    for figure in figures:
        assert figure.keys() == {"value", "unit", "source", "date", "measured"}
        assert figure["measured"] is False, "no shipped figure was measured by autobatch"


def test_unknown_figures_are_none(tmp_path):
    profile = a_profile()
    assert profile.total_bytes == 8 * GiB
    assert (profile.context_bytes, profile.workspaces) == (None, None)
    assert profile.compute_capability == (8, 6)


def test_the_toml_reads_back_equal(tmp_path):
    awkward = a_profile(title='A "GPU"\n\t\\ ü \x7f', device_names=("a,b", "c]"), context=None)
    file = write_atomic(tmp_path / "a.toml", format_profile(awkward).encode())
    assert read_profile(file) == awkward
    assert tomllib.loads(file.read_text(encoding="utf-8"))["title"] == awkward.title


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"gone\.toml cannot be read: No such file"):
        read_profile(tmp_path / "gone.toml")


def test_a_figure_has_the_unit_of_its_field():
    count = Figure(value=2, unit="count", source="a test", date="2026-11-21", measured=False)
    assert a_profile(cublas_workspaces=count).cublas_workspaces == count
    with pytest.raises(ValueError, match="unit of context is 'count': it must be 'B'"):
        a_profile(context=count)
    with pytest.raises(msgspec.ValidationError, match="unit of total"):
        msgspec.convert(
            msgspec.to_builtins(a_profile()) | {"total": msgspec.to_builtins(count)}, HardwareProfile
        )
