"""The stages of tuning, as far as ranks that share a model change them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from autobatch.api.tune_stage import settings_for
from autobatch.core.progress import Progress
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.tuning.tune_plan import TuneSettings


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_shared_model_is_tuned_only_in_a_process_that_can_be_replaced() -> None:
    notes, settings = Notes(), TuneSettings(trials=4, planned_steps=10, cap=8)
    here: Any = SimpleNamespace(is_replaceable=False, reason="it trains here")
    child: Any = SimpleNamespace(is_replaceable=True)
    assert settings_for(settings, here, None, notes) is settings
    assert settings_for(settings, child, ShardLayout(world=2), notes) is settings
    assert settings_for(settings, here, ShardLayout(world=2), notes).trials == 0
    assert notes.lines == ["the configuration of the shared model is not tuned: it trains here"]
    both = replace(settings, lr_trials=2)
    found = settings_for(both, here, ShardLayout(world=2), notes)
    assert (found.trials, found.lr_trials) == (0, 0)
    reason = "the configuration and the learning rate of the shared model are not tuned: it trains here"
    assert notes.lines[1:] == [reason]
