"""Hardware profiles: the shipped ones, those of the user, and files that are invalid."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from autobatch import InputError
from autobatch.core.files import write_atomic
from autobatch.core.units import GiB, MiB
from autobatch.device.profiles import data_home, list_profiles, load_profile

SHIPPED = sorted((Path(__file__).parents[2] / "profiles").glob("*.toml"))
WHOLE = (SHIPPED[0].parent / "t4.toml").read_text(encoding="utf-8")


def test_the_shipped_profiles_are_whole_and_sane():
    for file in SHIPPED:
        profile = load_profile(str(file))
        assert profile.name == file.stem
        assert profile.compute_capability >= (7, 0)
        assert 7 * GiB < profile.total_bytes < 256 * GiB
        assert 64 * MiB < profile.context_bytes < 2 * GiB
        for figure in tomllib.loads(file.read_text()).values():
            if isinstance(figure, dict):
                assert figure["measured"] is False, "no shipped figure was measured by autobatch"
                hosts = re.findall(r"https?://([^/]+)/", figure["source"])
                assert {*hosts} <= {"developer.nvidia.com", "github.com"}, "no maker, and no log of a GPU"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('title = "\xe9"', "is not TOML"),  # not UTF-8
        ("schema = 2\n", r"Invalid .* 2.*\$\.schema"),
        (WHOLE + "[contxt]\nvalue = 1\n", "unknown field `contxt`"),
        (WHOLE.replace('"7.5"', '"7"'), r"\$\.compute_capability"),
    ],
)
def test_a_malformed_file_is_named_with_its_field(tmp_path, text, message):
    file = write_atomic(tmp_path / "bad.toml", text.encode("latin-1"))
    with pytest.raises(InputError, match=message) as caught:
        load_profile(str(file))
    assert str(file) in str(caught.value)


def test_profiles_are_shipped_in_the_package_and_not_beside_an_installed_one(tmp_path, monkeypatch):
    package = tmp_path / "site" / "autobatch"
    monkeypatch.setattr(resources, "files", lambda _: package)
    write_atomic(tmp_path / "site" / "profiles" / "alien.toml", b"")
    with pytest.raises(InputError, match="known are none"):
        load_profile("alien")
    for file in SHIPPED:
        write_atomic(package / "profiles" / file.name, file.read_bytes())
    assert [profile.name for profile in list_profiles()] == [file.stem for file in SHIPPED]


def test_the_home_is_chosen_by_the_environment(tmp_path, monkeypatch):
    for chosen, name in ((str(tmp_path), tmp_path.name), ("", "autobatch")):
        monkeypatch.setenv("AUTOBATCH_HOME", chosen)
        assert data_home().name == name
    monkeypatch.delenv("AUTOBATCH_HOME")
    assert data_home().name == "autobatch"
