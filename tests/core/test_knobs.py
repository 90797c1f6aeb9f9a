"""The knobs that apply, their choices, and those that are tuned or offered unasked."""

from __future__ import annotations

import pytest

from autobatch.core.knobs import TuningContext, applicable, offered

BARE = TuningContext(
    precisions=("fp32",),
    optimizers=("default",),
    images=False,
    compiler="no compiler",
    micro_batch=1,
    planned_steps=1000,
)
GPU = BARE._replace(
    precisions=("fp32", "bf16"),
    optimizers=("default", "fused"),
    images=True,
    compiler=None,
    micro_batch=64,
    cores=6,
    fetch_seconds=0.4,
    gains_from_compile=True,
)
CPU = GPU._replace(gains_from_compile=False)
CORES = BARE._replace(cores=7, fetch_seconds=0.005)
DEFAULTS = {
    "micro_batch_shift": 0,
    "precision": "fp32",
    "compile": "off",
    "channels_last": False,
    "optimizer": "default",
    "loader_workers": 0,
}


def test_every_knob_begins_with_its_default_and_none_applies_without_a_choice() -> None:
    axes, notes = applicable(GPU, list(DEFAULTS))
    assert ({axis.name: axis.choices[0] for axis in axes}, notes) == (DEFAULTS, [])
    assert applicable(BARE) == ([], [])
    axes, notes = applicable(BARE, list(DEFAULTS))
    assert (axes, len(notes)) == ([], len(DEFAULTS))
    assert "compile is not tuned: no compiler" in notes


@pytest.mark.parametrize(
    ("here", "asked", "expected"),
    [
        # Compiled unasked on GPUs in long runs only.
        (CPU, ["compile"], {"compile": ["off", "default"]}),
        # Halved down to one sample and no further.
        (BARE._replace(micro_batch=7), None, {"micro_batch_shift": [0, 1, 2]}),
        # No more workers than cores, unasked if fetching takes 5 ms, and never if they cannot run.
        (CORES, None, {"loader_workers": [0, 2, 4]}),
        (CORES._replace(fetch_seconds=0.004), None, {}),
        (CORES._replace(loader="its samples cannot be sent"), ["loader_workers"], {}),
    ],
)
def test_what_is_tuned_follows_from_the_device_the_workload_and_the_run(here, asked, expected) -> None:
    assert {axis.name: list(axis.choices) for axis in applicable(here, asked)[0]} == expected


def test_what_changes_numbers_is_only_offered_unasked() -> None:
    assert {axis.name for axis in applicable(GPU)[0]} == {"micro_batch_shift", "loader_workers"}
    changing = {"precision", "channels_last", "optimizer"}
    assert {axis.name for axis in offered(GPU)} == changing | {"compile"}
    for here in (CPU, GPU._replace(planned_steps=60)):
        assert {axis.name for axis in offered(here)} == changing
    assert offered(BARE) == []
