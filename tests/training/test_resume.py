"""Checks before a resume, and the names of the differences that they find."""

from __future__ import annotations

import errno
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from autobatch import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.records import RunOrder
from autobatch.core.units import GiB, format_bytes
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan
from autobatch.setup.setup import device_key
from autobatch.training.checkpoint import Loaded, is_valid
from autobatch.training.resume import (
    changes_since_checkpoint,
    check_same_data_order,
    data_order_facts,
    load_plan,
    load_run_state,
)
from autobatch.workload.order import GlobalBatchSampler
from tests.support.checkpoints import STATE, facts_of, reseal, save_run
from tests.support.kinds import RUNS
from tests.support.options import as_options
from tests.support.training import make_loop, make_setup, make_workload

PLAN = make_plan(target_batch=32, micro_batch_limit=16, learning_rate=0.1)


def sampler(**changes: Any) -> GlobalBatchSampler:
    return GlobalBatchSampler(**{"samples": 96, "target_batch": 32, "seed": 0, "steps": 4, **changes})


def checkpoint(of: GlobalBatchSampler | None = None, *, done: int = 2, **facts: Any) -> Loaded:
    of = of or sampler()
    stored = {"plan": msgspec.to_builtins(PLAN), "ranks": [{}], "seed": 0, "warmup_samples": None}
    state = {"counters": {"batches_seen": done}}
    return Loaded(Path("step-2"), state, {**stored, **data_order_facts(of), **facts}, [])


def options(**changes: Any) -> Options:
    return as_options("fit", **{"target_batch": 32, **changes})


def test_the_newest_checkpoint_is_loaded_after_leftovers_are_cleaned(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    newest = save_run(folder, make_loop(make_workload()), 2)[-1]
    (folder / "step-00000003.tmp-1").mkdir()
    assert load_run_state(tmp_path).path == newest
    assert not (folder / "step-00000003.tmp-1").exists()
    for path in folder.iterdir():
        (path / STATE).write_bytes(b"")
    with pytest.raises(InputError, match=r"no checkpoint in .* is valid .*start without --resume") as caught:
        load_run_state(tmp_path)
    assert caught.value.exit_code == 2


NO_MEMORY = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    "python": MemoryError(),
    "system": OSError(errno.ENOMEM, "Cannot allocate memory"),
}


@pytest.mark.parametrize("error", NO_MEMORY)
@pytest.mark.parametrize(
    "place",
    [
        "autobatch.training.state_file._read_tensors",
        "hashlib.file_digest",
        "json.loads",
        "pathlib.Path.read_bytes",
    ],
)
def test_memory_that_runs_out_while_a_checkpoint_is_read_does_not_make_it_invalid(
    place: str, error: str, tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "checkpoints"
    newest = save_run(folder, make_loop(make_workload()), 2)[-1]
    (folder / "step-00000001").rename(folder / "step-00000001.trash-1")

    def fail(*_: object, **__: object) -> None:
        raise NO_MEMORY[error].with_traceback(None)

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(DoesNotFitError, match="not enough memory to resume from") as caught:
            load_run_state(tmp_path)
    size = format_bytes(sum(file.stat().st_size for file in newest.iterdir()))
    assert f"{newest}: its state takes {size} of host memory, found " in str(caught.value)
    assert caught.value.exit_code == 3
    assert ".." not in str(caught.value)
    assert "\n" not in str(caught.value)
    loaded = load_run_state(tmp_path)
    assert (loaded.path, loaded.passed_over) == (newest, [])
    assert is_valid(folder / "step-00000001"), "a checkpoint that was set aside is not deleted"


def test_a_run_without_checkpoints_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--resume found no checkpoint in .*: start without --resume"):
        load_run_state(tmp_path)


@pytest.mark.parametrize(
    ("facts", "asked", "message"),
    [
        ({}, {"target_batch": 16}, "--target-batch 16 does not match the checkpoint step-2, which has 32"),
        ({}, {"seed": 7}, "--seed 7 does not match the checkpoint step-2, which has 0"),
        ({}, {"warmup_samples": 9}, "--warmup-samples 9 does not match .*, which has none: give the same"),
        ({"warmup_samples": 9}, {}, "no --warmup-samples does not match .*, which has 9: give the same"),
    ],
)
def test_another_batch_seed_or_warmup_is_refused(facts, asked, message: str) -> None:
    assert load_plan(checkpoint(), options()) == PLAN
    with pytest.raises(InputError, match=message):
        load_plan(checkpoint(**facts), options(**asked))


SHORT = sampler(samples=80, steps=None, epochs=1)
"""The third batch has 16 samples, and would have 32 in a longer run."""


@pytest.mark.parametrize(
    ("stored", "now", "message"),
    [
        ({}, {"samples": 80}, "number of training samples 80 does not match .* step-2, which has 96: give"),
        ({}, {"last_batch": "flush"}, "--last-batch flush does not match .*, which has carry"),
        ({"done": 4}, {"steps": 3}, "this run has 3 optimizer steps, but .* step-2 has taken 4 already"),
        ({"order": 3}, {}, "version of the data order 2 does not match .* which has 3: give the run its own"),
        ({"order": None}, {}, "which has 1: give the run its own"),
        ({"sampler": "1f"}, {}, "no order of the sampler does not match .*, which has 1f"),
        ({"scheduled": True}, {"steps": 9}, "schedule was built for, 9 does not match .*, which has 4"),
        ({"of": SHORT, "done": 3}, {"samples": 80, "steps": None, "epochs": 2}, "in 3 .* 96 .* has 80: give"),
    ],
)
def test_another_order_of_the_data_is_refused(stored, now, message: str) -> None:
    scheduled = stored.get("scheduled", False)
    found = checkpoint(**stored)
    # A checkpoint without a version has the first, in which an epoch was a list drawn by torch.
    if found.facts["order"] is None:
        del found.facts["order"]
    with pytest.raises(InputError, match=message):
        check_same_data_order(found, sampler(**now), scheduled=scheduled)


def test_a_run_of_the_same_data_order_may_be_longer() -> None:
    check_same_data_order(checkpoint(), sampler(), scheduled=True)
    check_same_data_order(checkpoint(), sampler(steps=9), scheduled=False)
    check_same_data_order(checkpoint(SHORT, done=3), SHORT, scheduled=False)


@pytest.mark.parametrize(
    ("facts", "asked", "expected"),
    [
        ({}, {}, []),
        ({"other": 2}, {"max_micro_batch": 16}, []),
        ({"device": "gpu", "torch": "3"}, {}, ["device", "torch"]),
        ({"precision": "bf16"}, {"max_micro_batch": 15}, ["--precision", "--max-micro-batch"]),
        # What is free now differs each time: only a budget that the user gave is a change.
        ({"budget_bytes": 4 * GiB}, {}, []),
        ({"budget_bytes": 4 * GiB}, {"memory_budget": "1GiB"}, ["--memory-budget"]),
        ({"budget_bytes": GiB}, {"memory_budget": "1GiB"}, []),
        ({}, {"split": "size"}, ["--split"]),
    ],
)
def test_changes_that_rule_out_a_bit_exact_resume_are_named(facts, asked, expected) -> None:
    setup = make_setup(make_workload())
    before = checkpoint(ranks=[{**device_key(setup), **facts}])
    found = changes_since_checkpoint(before, setup, sampler(), Ranks(), options(**asked))
    assert found == expected


def test_another_number_of_ranks_and_a_run_beyond_its_planned_order_are_changes() -> None:
    order = RunOrder(batches=3, by="run", micro_batch_in_any_order=8, digest="of other sizes")
    plan = msgspec.to_builtins(msgspec.structs.replace(PLAN, run_order=order))
    found = changes_since_checkpoint(
        checkpoint(plan=plan, ranks=[{}, {}]), make_setup(make_workload()), sampler(), Ranks(), options()
    )
    assert found == ["number of ranks", "sizes of the samples", "number of optimizer steps"]


# what a checkpoint holds


def open_loop(kind: str = "augmented, averaged"):
    workload, options = RUNS[kind]()
    return make_loop(workload, target_batch=7, micro_batch=3, steps=4, **options)


@pytest.mark.parametrize("kind", RUNS)
def test_every_run_has_a_valid_content(kind: str, tmp_path: Path) -> None:
    newest = save_run(tmp_path / "checkpoints", open_loop(kind), 2)[-1]
    assert load_run_state(tmp_path).path == newest


def edit(path: Path, keys: tuple[str | int, ...], value: Any = None) -> None:
    """Change an entry of a checkpoint, or delete it, and give the files valid sums."""

    def change(state: dict[str, Any], facts: dict[str, Any]) -> None:
        *places, last = keys
        content: Any = {"state": state, "facts": facts}
        for place in places:
            content = content[place]
        content[last] = value
        if value is None:
            del content[last]

    reseal(path, change)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("state", "counters", "batches_seen"), -3, r"state\.json .*batches_seen"),
        (("state", "counters", "batches_seen"), 1, "has the state of step 1, not 2"),
        (("state", "counters", "batches_seen"), 1.5, "batches_seen"),
        (("state", "counters", "steps_applied"), -1, "steps_applied"),
        (("state", "counters", "oom_recoveries"), -1, "oom_recoveries"),
        (("state", "counters", "steps_applied"), 3, "counts more steps than the 2 of its name"),
        (("state", "limits"), [0], "limits"),
        (("state", "noise"), {"every": 0, "pairs": []}, "noise"),
        (("state", "items_per_sample"), 0.0, "items_per_sample"),
        (("state", "model"), "weights", "model"),
        (("state", "optimizers"), {}, "optimizers"),
        (("state", "random", 0, "torch"), "no numbers", "hexadecimal"),
        (("state", "random", 0, "numpy"), 3, r"state\.json holds no run"),
        (("facts", "plan"), {}, r"manifest\.json .*plan"),
        (("facts", "plan", "micro_batch"), -1, "micro_batch"),
        (("facts", "plan", "micro_batches"), [-2, 9], "micro_batches"),
        (("facts", "plan", "learning_rate"), math.nan, "learning_rate"),
        (("facts", "key", "budget_bytes"), "all", "budget_bytes"),
        (("facts", "ranks", 0, "budget_bytes"), [], "budget_bytes"),
        (("facts", "records"), {"device": 3}, "device"),
        (("facts", "notes"), [3], "notes"),
        (("facts", "samples"), 0, "samples"),
        (("facts", "total_steps"), "4", "total_steps"),
        (("facts", "last_batch"), "twice", "last_batch"),
    ],
)
def test_an_impossible_figure_is_named_and_the_checkpoint_passed_over(
    keys, value, message: str, tmp_path: Path
) -> None:
    older, newer = save_run(tmp_path / "checkpoints", open_loop(), 2)
    edit(newer, keys, value)
    loaded = load_run_state(tmp_path)
    assert loaded.path == older
    (line,) = loaded.passed_over
    assert line.startswith(f"{newer}: ")
    assert re.search(message, line)
    assert "\n" not in line


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    """Only a checkpoint of several ranks, or of a stream, has all of them."""
    (path,) = save_run(tmp_path / "checkpoints", open_loop(), 1)
    state, facts = load_run_state(tmp_path).state, facts_of(open_loop())
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    # Without a version of the order it is that of the first version, which a resume refuses by name.
    for keys in (
        *(("state", name) for name in state.keys() - {"stream", "names"}),
        *(("state", "counters", name) for name in state["counters"]),
        *(("facts", name) for name in facts.keys() - {"key", "order", "sampler"}),
    ):
        edit(path, keys)
        file = "state" if keys[0] == "state" else "manifest"
        with pytest.raises(InputError, match=rf"{file}\.json .*`{keys[-1]}`"):
            load_run_state(tmp_path)
        for name, content in files.items():
            (path / name).write_bytes(content)
