"""The knobs of a workload on a device, and those that are tuned or offered unasked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.core.records import KNOBS
from autobatch.tuning.fastest import Knob, choose_knobs, defaults
from tests.support.training import Rows
from tests.support.trials import trial_setup

DEFAULTS = dict(zip(KNOBS, (0, "fp32", "off", False, "default", 0), strict=True))
CHANGING = {"precision", "channels_last", "optimizer"}


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that chooses for a small network for images on a GPU, some of which is different."""

    def choose(
        asked: Sequence[str] | None, micro_batch: int = 64, steps: int = 1000, workers: int | None = None,
        **changed: Any,
    ) -> tuple[list[Knob], list[Knob], list[str]]:  # fmt: skip
        known = {"precisions": ("bf16", "fp32"), "compiler": None, "gains": True, "cores": 6, "fetch_s": 0.4}
        known |= {"images": (8, 3, 4, 4), "optimizers": ("default", "fused"), **changed}
        device: Any = SimpleNamespace(
            native_precisions=lambda: known["precisions"],
            compiler_missing=known["compiler"],
            gains_from_compile=known["gains"],
            optimizer_implementations=known["optimizers"],
        )
        monkeypatch.setattr("autobatch.tuning.fastest.usable_cores", lambda: known["cores"])
        data = Rows(torch.randn(*known["images"]), torch.zeros(8, dtype=torch.long))
        made = trial_setup(model=lambda: nn.Conv2d(3, 3, 1), train_data=data)
        setup = replace(made, device=device, clock=iter((0.0, known["fetch_s"])).__next__)
        return choose_knobs(setup, asked, micro_batch, steps, workers)

    return choose


BARE = {
    "precisions": ("fp32",),
    "optimizers": ("default",),
    "images": (8, 3),
    "compiler": "no compiler",
    "cores": 1,
}


def test_every_knob_begins_with_its_default_and_none_is_tuned_without_a_choice(knobs: Any) -> None:
    tuned, offered, notes = knobs(KNOBS)
    assert (defaults(tuned), offered, notes) == (DEFAULTS, [], [])
    assert knobs(None, 1, **BARE) == ([], [], [])
    tuned, _, notes = knobs(KNOBS, 1, **BARE)
    assert (tuned, len(notes)) == ([], len(DEFAULTS))
    assert "compile is not tuned: no compiler" in notes


@pytest.mark.parametrize(
    ("here", "asked", "expected"),
    [
        # Compiled unasked on GPUs in long runs only.
        ({"gains": False}, ["compile"], {"compile": ("off", "default")}),
        # Halved down to one sample and no further.
        ({**BARE, "micro_batch": 7}, None, {"micro_batch_shift": (0, 1, 2)}),
        # No more workers than cores, unasked if fetching takes 5 ms, and never if their number is given.
        ({"micro_batch": 1, "cores": 7, "fetch_s": 0.005}, None, {"loader_workers": (0, 2, 4)}),
        ({"micro_batch": 1, "cores": 7, "fetch_s": 0.004}, None, {}),
        ({"workers": 0}, ["loader_workers"], {}),
    ],
)
def test_what_is_tuned_follows_from_the_device_the_workload_and_the_run(
    knobs: Any, here: dict[str, Any], asked: list[str] | None, expected: dict[str, Any]
) -> None:
    assert {knob.name: knob.choices for knob in knobs(asked, **here)[0]} == expected


def test_what_changes_numbers_is_only_offered_unasked(knobs: Any) -> None:
    tuned, offered, _ = knobs(None)
    assert {knob.name for knob in tuned} == {"micro_batch_shift", "loader_workers"}
    assert {knob.name for knob in offered} == CHANGING | {"compile"}
    for here in ({"gains": False}, {"steps": 60}):
        assert {knob.name for knob in knobs(None, **here)[1]} == CHANGING
