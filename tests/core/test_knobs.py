"""The knobs that apply, their defaults, and the names that are accepted."""

from __future__ import annotations

import pytest

from autobatch.core.knobs import TuningContext, applicable, memory_signature, numeric_signature

GPU = TuningContext(
    precisions=("bf16", "fp32"),
    optimizers=("default", "fused"),
    blocks=12,
    images=True,
    compiler=None,
    micro_batch=64,
    planned_steps=1000,
    cores=6,
    fetch_share=0.4,
    gains_from_compile=True,
    reads_pinned_memory=True,
    segments=None,
)
BARE = TuningContext(
    precisions=("fp32",),
    optimizers=("default",),
    blocks=0,
    images=False,
    compiler="no compiler",
    micro_batch=1,
    planned_steps=1000,
)


DEFAULTS = {
    "micro_batch_shift": 0,
    "precision": "bf16",
    "checkpointing": "none",
    "compile": "off",
    "channels_last": False,
    "optimizer": "default",
    "loader_workers": 0,
    "prefetch": 2,
    "pin_memory": True,
    "expandable_segments": False,
}


def test_every_knob_begins_with_its_default_and_none_applies_without_a_choice() -> None:
    axes, notes = applicable(GPU, list(DEFAULTS))
    assert ({axis.name: axis.choices[0] for axis in axes}, notes) == (DEFAULTS, [])
    assert applicable(BARE) == ([], [])
    axes, notes = applicable(BARE, list(DEFAULTS))
    assert (axes, len(notes)) == ([], len(DEFAULTS))
    assert "compile is not tuned: no compiler" in notes


def test_the_compiler_is_tuned_unasked_on_gpus_in_long_runs_only_and_graphs_on_gpus_only() -> None:
    cpu = GPU._replace(gains_from_compile=False)
    assert "compile" in [axis.name for axis in applicable(GPU)[0]]
    for here in (cpu, GPU._replace(planned_steps=60)):
        assert "compile" not in [axis.name for axis in applicable(here)[0]]
    choices = [applicable(here, ["compile"])[0][0].choices for here in (GPU, cpu)]
    assert choices == [("off", "default", "reduce-overhead"), ("off", "default")]


@pytest.mark.parametrize(
    ("micro_batch", "shifts"), [(1, []), (2, [0, 1]), (7, [0, 1, 2]), (64, [0, 1, 2, 3])]
)
def test_the_micro_batch_is_halved_down_to_one_sample_and_no_further(
    micro_batch: int, shifts: list[int]
) -> None:
    axes, _ = applicable(BARE._replace(micro_batch=micro_batch))
    assert [list(axis.choices) for axis in axes] == ([shifts] if shifts else [])


def test_knobs_that_change_memory_and_knobs_that_change_numbers() -> None:
    feed = {"micro_batch_shift", "loader_workers", "prefetch", "pin_memory"}
    assert set(memory_signature(DEFAULTS)) == set(DEFAULTS) - feed
    assert set(numeric_signature(DEFAULTS)) == set(DEFAULTS) - feed - {"expandable_segments"}


@pytest.mark.parametrize(("cores", "choices"), [(1, []), (2, [0, 2]), (7, [0, 2, 4]), (96, [0, 2, 4, 8, 16])])
def test_there_are_no_more_workers_than_cores(cores: int, choices: list[int]) -> None:
    axes, notes = applicable(BARE._replace(cores=cores), ["loader_workers"])
    assert [list(axis.choices) for axis in axes] == ([choices] if choices else [])
    assert notes == ([] if choices else ["loader_workers is not tuned: this process may use a single core"])


def test_workers_are_tuned_unasked_if_fetching_is_slow_and_never_if_they_cannot_run() -> None:
    here = BARE._replace(cores=4, fetch_share=0.19)
    assert applicable(here) == ([], [])
    assert [axis.name for axis in applicable(here._replace(fetch_share=0.2))[0]] == ["loader_workers"]
    _, notes = applicable(here._replace(loader="its samples cannot be sent"), ["loader_workers"])
    assert notes == ["loader_workers is not tuned: its samples cannot be sent"]


def test_the_feed_of_workers_is_tuned_only_by_name_and_with_workers() -> None:
    names = ["prefetch", "pin_memory"]
    assert not set(names) & {axis.name for axis in applicable(GPU)[0]}
    assert [axis.name for axis in applicable(GPU, names)[0]] == names
    assert [axis.name for axis in applicable(GPU._replace(reads_pinned_memory=False), names)[0]] == names[:1]
    assert applicable(BARE, names)[0] == []
