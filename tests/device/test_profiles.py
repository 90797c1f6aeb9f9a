"""Profiles by name: the shipped ones, those of the user, and the one of a GPU in this machine."""

import sys
from pathlib import Path

import pytest

from autobatch import InputError
from autobatch.core.files import write_atomic
from autobatch.device.profiles import (
    data_home,
    format_profile,
    list_profiles,
    load_profile,
    profile_folder,
    save_profile,
)
from tests.support.hardware import a_profile

REPOSITORY = Path(__file__).parents[2]
SHIPPED = sorted((REPOSITORY / "profiles").glob("*.toml"))
WANTED = {
    "t4", "v100-16gb", "v100-32gb", "rtx-3060-12gb", "rtx-3090", "rtx-4090", "rtx-5090", "a10", "l4", "l40s",
    "a100-40gb", "a100-80gb", "h100-80gb", "h100-pcie-80gb", "h200", "b200",
    "v100-pcie-16gb", "v100-pcie-32gb",
}  # fmt: skip


def test_every_wanted_gpu_is_shipped(tmp_path):
    assert {file.stem for file in SHIPPED} >= WANTED
    listing = list_profiles(user_dir=tmp_path)
    assert [profile.name for profile in listing.profiles] == [file.stem for file in SHIPPED]
    assert listing.problems == ()


def test_a_path_comes_before_a_name_and_a_saved_profile_before_a_shipped_one(tmp_path):
    assert load_profile("t4", user_dir=tmp_path).title == "NVIDIA T4"
    mine = save_profile(a_profile(name="t4"), user_dir=tmp_path)
    assert mine == tmp_path / "profiles" / "t4" / "profile.toml"
    assert load_profile("t4", user_dir=tmp_path).title == "My GPU"
    other = write_atomic(tmp_path / "other.toml", format_profile(a_profile()).encode())
    assert load_profile(str(other), user_dir=tmp_path).name == "my-gpu"
    assert {p.title for p in list_profiles(user_dir=tmp_path).profiles if p.name == "t4"} == {"My GPU"}


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("rtx4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("h20", "h200"),
        ("A100_80GB", "a100-80gb"),
        ("a100", "a100-40gb' or 'a100-80gb"),
    ],
)
def test_an_unknown_name_lists_the_nearest_and_all(tmp_path, asked, near):
    with pytest.raises(InputError, match=rf"no profile '{asked}': did you mean '{near}'\?.*a100-40gb, .*t4"):
        load_profile(asked, user_dir=tmp_path)


def test_a_missing_file_is_no_near_miss(tmp_path):
    with pytest.raises(InputError, match=r"no profile file at nowhere/t4\.toml"):
        load_profile("nowhere/t4.toml", user_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = ", "is not TOML"),
        ("schema = 2\n", "schema 2: this autobatch reads 1"),
        ("schema = 1\n", "missing required field"),
        (format_profile(a_profile()) + "[contxt]\nvalue = 1\n", "unknown field `contxt`"),
        (format_profile(a_profile()).replace("value = 8589934592", 'value = "8 GiB"'), r"\$\.total\.value"),
        (format_profile(a_profile()).replace("value = 8589934592", "value = 0"), r"\$\.total\.value"),
        (format_profile(a_profile()).replace('unit = "B"', 'unit = "FLOP/s"'), "unit of total is 'FLOP/s'"),
        (format_profile(a_profile()).replace('"8.6"', '"8"'), r"\$\.compute_capability"),
        (format_profile(a_profile()).replace('source = "a test"\n', ""), "`source`"),
        (format_profile(a_profile()).replace("2026-11-21", "yesterday"), r"\$\.total\.date"),
    ],
)
def test_a_malformed_file_is_named_with_its_field(tmp_path, text, message):
    file = write_atomic(tmp_path / "profiles" / "bad" / "profile.toml", text.encode())
    with pytest.raises(InputError, match=message) as caught:
        load_profile("bad", user_dir=tmp_path)
    assert str(file) in str(caught.value)
    listing = list_profiles(user_dir=tmp_path)
    assert str(file) in listing.problems[0]
    assert {profile.name for profile in listing.profiles} >= WANTED


def test_not_utf_8_is_malformed(tmp_path):
    file = write_atomic(tmp_path / "latin.toml", b'title = "\xe9"')
    with pytest.raises(InputError, match="is not TOML"):
        load_profile(str(file), user_dir=tmp_path)


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    package = tmp_path / "site" / "installed_autobatch"
    write_atomic(package / "__init__.py", b"")
    monkeypatch.syspath_prepend(str(package.parent))
    yield package
    sys.modules.pop(package.name, None)


def test_an_installed_wheel_carries_its_profiles(tmp_path, fake_package):
    for file in SHIPPED:
        write_atomic(fake_package / "profiles" / file.name, file.read_bytes())
    found = list_profiles(user_dir=tmp_path, package=fake_package.name).profiles
    assert {profile.name for profile in found} >= WANTED
    assert load_profile("h200", user_dir=tmp_path, package=fake_package.name).name == "h200"


def test_a_folder_beside_an_installed_package_is_ignored(tmp_path, fake_package):
    write_atomic(fake_package.parent / "profiles" / "alien.toml", b"")
    assert list_profiles(user_dir=tmp_path, package=fake_package.name).profiles == ()
    with pytest.raises(InputError, match="known are none"):
        load_profile("alien", user_dir=tmp_path, package=fake_package.name)


def test_a_saved_profile_reads_back_equal(tmp_path):
    awkward = a_profile(title='A "GPU"\n\t\\ ü \x7f', device_names=("a,b", "c]"), context=None)
    save_profile(awkward, user_dir=tmp_path)
    assert load_profile("my-gpu", user_dir=tmp_path) == awkward
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.toml")] == [
        "profiles/my-gpu/profile.toml"
    ]
    assert "context" not in (tmp_path / "profiles" / "my-gpu" / "profile.toml").read_text()


def test_a_home_that_is_not_writable_is_named(tmp_path):
    home = write_atomic(tmp_path / "file", b"") / "home"  # below a file, where even root cannot write
    with pytest.raises(InputError, match=rf"{home.name}.* cannot be written: .*AUTOBATCH_HOME"):
        save_profile(a_profile(), user_dir=home)


def test_a_folder_is_named_after_the_saved_profile_of_the_device_else_after_the_device(tmp_path):
    folder = tmp_path / "profiles"
    assert profile_folder("NVIDIA H200", user_dir=tmp_path) == folder / "nvidia-h200"
    assert profile_folder("AMD EPYC (Zen 4)", user_dir=tmp_path) == folder / "amd-epyc-zen-4"
    save_profile(a_profile(device_names=("NVIDIA H200",)), user_dir=tmp_path)
    assert profile_folder("nvidia h200", user_dir=tmp_path) == folder / "my-gpu"


def test_the_home_is_chosen_by_the_environment(tmp_path):
    assert data_home({"AUTOBATCH_HOME": str(tmp_path)}) == tmp_path
    assert data_home({"AUTOBATCH_HOME": ""}).name == "autobatch"
    assert data_home({}).name == "autobatch"
