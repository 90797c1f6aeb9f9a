"""The options that several commands have in common."""

from __future__ import annotations

import pytest

from autobatch.core.options import COMMANDS, FitOptions, ProbeOptions


def test_only_commands_with_a_batch_have_one() -> None:
    assert ProbeOptions().batch is None
    assert FitOptions(target_batch=7).batch == 7


@pytest.mark.parametrize("command", ["probe", "plan", "tune", "fit"])
def test_every_search_runs_over_ranks(command: str) -> None:
    over_ranks = {"ranks", "parallel", "shard_sync", "shard_modules", "grad_sync"}
    assert over_ranks <= set(COMMANDS[command].__struct_fields__)
