"""Options unpacked into settings: each option changes some settings, unless a stage reads it itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch.api import unpack
from autobatch.core.check_options import options_from
from autobatch.core.options import COMMANDS
from autobatch.setup.setup import SetupInfo, SetupSettings, describe_setup, open_setup
from autobatch.workload import demo
from tests.support.options import CHANGED, all_changed, required
from tests.support.probes import work

PRINTING = {"json", "quiet", "verbose"}
OVER_RANKS = {"ranks", "parallel", "shard_sync", "shard_modules", "grad_sync"}
READ_BY_STAGES = {
    "probe": {"micro_batch", "memory_viz", *OVER_RANKS},
    "plan": {"split", "static_shapes", "memory_viz", "own_loop", "split_check", *OVER_RANKS},
    "tune": {"split", "static_shapes", "memory_viz", "timeout", *OVER_RANKS},
    "fit": {
        "split",
        "static_shapes",
        "memory_viz",
        "timeout",
        "resume",
        "out",
        "split_check",
        "collective_timeout",
        *(OVER_RANKS - {"grad_sync"}),
    },
    "estimate": {"all", "report"},
}
"""Options that decide which stages run, in how many processes, and with which folder, time and check."""
ALL = [(command, field) for command, kind in COMMANDS.items() for field in kind.__struct_fields__]


@pytest.fixture(scope="module")
def info() -> SetupInfo:
    made = open_setup(work(base_batch=8), SetupSettings(device="cpu", memory_budget="64MiB"))
    return describe_setup(made)


def settings_of(command: str, info: SetupInfo, values: dict[str, Any]) -> list[object]:
    """Return everything that the options of a command are unpacked into."""
    options: Any = options_from(COMMANDS[command], {**required(command), **values})
    if command == "estimate":
        ranks = unpack.rank_settings(options)
        return [unpack.estimate_settings(options), *([] if ranks is None else [ranks])]
    if command == "probe":
        return [unpack.setup_settings(options), unpack.probe_limits(options)]
    batch = options.target_batch
    found = [unpack.setup_settings(options), unpack.probe_limits(options, batch)]
    world_size = unpack.world_size_of(options, {}) if command == "plan" else 1
    found.append(unpack.plan_for(info, 16, options, world_size))
    if command == "tune":
        found.append(unpack.tune_settings(options, info, 100))
    if command == "fit":
        loop = unpack.loop_settings(options, is_demo=False)
        found += [loop, unpack.fit_tune_settings(options, info, 100)]
        found.append(unpack.run_settings(options, Path("run"), "resume"))
    return found


def test_the_changed_values_cover_every_option() -> None:
    assert set(CHANGED) == {field for _, field in ALL}


@pytest.mark.parametrize(("command", "field"), ALL, ids=map(" ".join, ALL))
def test_an_option_changes_some_settings_unless_a_stage_reads_it(
    command: str, field: str, info: SetupInfo
) -> None:
    # A base batch counts only with a rule.
    base: dict[str, Any] = {"lr_rule": "linear"} if field == "base_batch" else {}
    if field == "lr_trials":
        base = {"tune_lr": True}
    if field in ("parallel", "shard_sync", "shard_modules"):
        base = {"ranks": 4}
    before = settings_of(command, info, base)
    after = settings_of(command, info, {**base, field: CHANGED[field]})
    is_read_elsewhere = field in PRINTING | READ_BY_STAGES[command]
    assert (before == after) == is_read_elsewhere


@pytest.mark.parametrize("command", COMMANDS)
def test_a_changed_option_keeps_its_value_in_settings_of_its_name(command: str, info: SetupInfo) -> None:
    """The oracle is the name: a field of settings with the name of an option has the value of that option."""
    changed = all_changed(command)
    fields = [
        (name, getattr(settings, name))
        for settings in settings_of(command, info, changed)
        if not isinstance(settings, msgspec.Struct)
        for name in vars(settings)
    ]
    shared = {name: value for name, value in fields if name in changed and name != "out"}
    assert shared == {name: changed[name] for name in shared}
    assert len(shared) >= 5


def test_no_time_limit_is_endless_and_a_given_budget_does_not_follow_free_memory() -> None:
    plain = unpack.probe_limits(options_from(COMMANDS["probe"], {}))
    assert (plain.time_limit_s, plain.has_own_budget, plain.target_batch) == (math.inf, False, None)
    given = unpack.probe_limits(options_from(COMMANDS["probe"], {"memory_budget": "1GiB", "time_limit": 3}))
    assert (given.time_limit_s, given.has_own_budget) == (3.0, True)


@pytest.mark.parametrize(
    ("values", "is_demo", "length"),
    [
        ({}, False, (None, 1)),
        ({}, True, (demo.STEPS, None)),
        ({"steps": 5}, True, (5, None)),
        ({"epochs": 2}, True, (None, 2)),
    ],
)
def test_a_run_without_a_length_is_one_epoch_and_that_of_the_demo_its_own(
    values: dict[str, int], is_demo: bool, length: tuple[int | None, int | None]
) -> None:
    options: Any = options_from(COMMANDS["fit"], {"target_batch": 8, **values})
    settings = unpack.loop_settings(options, is_demo=is_demo)
    assert (settings.steps, settings.epochs) == length


def test_the_base_batch_of_the_options_replaces_that_of_the_workload(info: SetupInfo) -> None:
    def plan(**values: Any) -> Any:
        return unpack.plan_for(
            info, 16, options_from(COMMANDS["plan"], {"target_batch": 32, "lr_rule": "linear", **values})
        )

    assert plan().learning_rate == pytest.approx(info.learning_rate * 32 / 8)
    assert plan(base_batch=64).learning_rate == pytest.approx(info.learning_rate * 32 / 64)


@pytest.mark.parametrize(
    ("values", "trials", "run_samples"), [({}, 8, 3200), ({"trials": 0}, 0, None), ({"trials": 5}, 5, None)]
)
def test_tuning_must_pay_back_only_if_no_number_of_trials_is_given(
    values: dict[str, int], trials: int, run_samples: int | None, info: SetupInfo
) -> None:
    options: Any = options_from(COMMANDS["fit"], {"target_batch": 32, **values})
    settings = unpack.fit_tune_settings(options, info, 100)
    assert (settings.trials, settings.run_samples) == (trials, run_samples)
    assert unpack.tune_settings(options, info, 100).run_samples is None


def test_the_cap_of_trials_is_the_smallest_of_data_batch_and_option(info: SetupInfo) -> None:
    for values, cap in [({}, 32), ({"max_micro_batch": 5}, 5), ({"target_batch": 10_000}, info.samples)]:
        options: Any = options_from(COMMANDS["tune"], {"target_batch": 32, **values})
        assert unpack.tune_settings(options, info, 100).cap == cap
