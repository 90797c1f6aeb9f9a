"""The stages of tuning, as far as ranks that share a model change them."""

from __future__ import annotations

from dataclasses import replace

from autobatch.api.tune_stage import settings_for
from autobatch.core.progress import Progress
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.tuning.tune_plan import TuneSettings


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_model_that_ranks_share_is_not_tuned() -> None:
    notes, settings = Notes(), TuneSettings(trials=4, planned_steps=10, cap=8)
    assert settings_for(settings, None, notes) is settings
    assert settings_for(settings, ShardLayout(world=2), notes).trials == 0
    assert notes.lines == ["the configuration is not tuned, because the ranks share the model"]
    found = settings_for(replace(settings, lr_trials=2), ShardLayout(world=2), notes)
    assert (found.trials, found.lr_trials) == (0, 0)
    assert notes.lines[1:] == [
        "the configuration and the learning rate are not tuned, because the ranks share the model"
    ]
