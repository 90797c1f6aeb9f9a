"""A checkpoint with valid sums but an impossible content is passed over, and its fault is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autobatch.core.errors import CheckpointError, InputError
from autobatch.training.checkpoints.checkpoint import save_checkpoint
from autobatch.training.checkpoints.content import check_content
from autobatch.training.checkpoints.load import load_newest
from autobatch.training.loop_state import capture_loop
from autobatch.training.resume import load_run_state
from tests.support.checkpoints import MANIFEST, STATE, facts_of, reseal, save_run
from tests.support.kinds import RUNS
from tests.support.training import make_loop

NAN, INF = float("nan"), float("inf")


def open_loop(kind: str = "augmented, averaged"):
    workload, options = RUNS[kind]()
    return make_loop(workload, target_batch=7, micro_batch=3, steps=4, **options)


@pytest.mark.parametrize("kind", RUNS)
def test_every_run_has_a_valid_content(kind: str, tmp_path: Path) -> None:
    loop = open_loop(kind)
    start = save_checkpoint(tmp_path / "start", step=0, state=capture_loop(loop), facts=facts_of(loop))
    assert load_newest(tmp_path / "start", check_content).path == start
    last = save_run(tmp_path / "run", loop, 2)[-1]
    assert load_newest(tmp_path / "run", check_content).path == last


def put(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


STATES = {
    "negative batches": (put("counters", "batches_seen", value=-3), "batches_seen"),
    "other batches": (put("counters", "batches_seen", value=1), "batches_seen must be 2, found 1"),
    "fractional batches": (put("counters", "batches_seen", value=1.5), "batches_seen"),
    "micro-batch 0": (put("limits", value=[0]), "limits"),
    "negative steps": (put("counters", "steps_applied", value=-1), "steps_applied"),
    "more steps than batches": (put("counters", "steps_applied", value=9), "9 applied and 0 skipped steps"),
    "more skips than batches": (put("counters", "skipped_steps_in_a_row", value=3), "3 skipped steps"),
    "negative recoveries": (put("counters", "oom_recoveries", value=-1), "oom_recoveries"),
    "no items": (put("items_per_sample", value=0.0), "items_per_sample"),
    "infinite items": (put("items_per_sample", value=INF), "items_per_sample"),
    "unknown items": (put("items_per_sample", value=NAN), "items_per_sample"),
    "text as model": (put("model", value="weights"), "model"),
    "no list of optimizers": (put("optimizers", value={}), "optimizers"),
    "no state of torch": (put("random", 0, "torch", value="no numbers"), "hexadecimal"),
    "foreign state of numpy": (put("random", 0, "numpy", value=3), "not subscriptable"),
}
FACTS = {
    "no plan": (put("plan", value={}), "plan"),
    "micro-batch 0": (put("plan", "micro_batch", value=0), "between 1 and the target batch of 7, found 0"),
    "larger than the batch": (put("plan", "micro_batch", value=8), "target batch of 7, found 8"),
    "no learning rate": (put("plan", "learning_rate", value=NAN), "learning rate .* found nan"),
    "workers in words": (put("plan", "knobs", value={"loader_workers": "many"}), "loader_workers .*'many'"),
    "negative workers": (put("plan", "knobs", value={"loader_workers": -1}), "loader_workers .* found -1"),
    "no samples": (put("samples", value=0), "samples"),
    "steps as text": (put("total_steps", value="4"), "total_steps"),
    "another order": (put("last_batch", value="twice"), "last_batch"),
}


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        *(pytest.param(0, *case, id=f"state: {name}") for name, case in STATES.items()),
        *(pytest.param(1, *case, id=f"facts: {name}") for name, case in FACTS.items()),
    ],
)
def test_an_impossible_figure_is_named_and_the_checkpoint_passed_over(
    part: int, change, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    older, newer = save_run(folder, open_loop(), 2)
    reseal(newer, lambda *content: change(content[part]))
    loaded = load_run_state(tmp_path)
    assert loaded.path == older
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(*loaded.passed_over)
    assert f"{newer}: {MANIFEST if part else STATE} holds no run to resume" in loaded.passed_over[0]
    older.rename(tmp_path / "away")
    with pytest.raises(InputError, match=r"no checkpoint in .* is valid") as caught:
        load_run_state(tmp_path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_missing_entry_is_named() -> None:
    loop = open_loop()
    state, facts = capture_loop(loop), facts_of(loop)
    path = Path("step-00000000")
    check_content(path, state, facts)
    # A checkpoint of one process may lack what those of several ranks, or of a stream, have.
    for name in state.keys() - {"stream", "names"}:
        with pytest.raises(CheckpointError, match=rf"state\.json .*`{name}`"):
            check_content(path, {key: value for key, value in state.items() if key != name}, facts)
    for name in state["counters"]:
        less = {key: value for key, value in state["counters"].items() if key != name}
        with pytest.raises(CheckpointError, match=rf"state\.json .*`{name}`"):
            check_content(path, {**state, "counters": less}, facts)
    # Without a version of the order it is that of the first version, which a resume refuses by name.
    for name in facts.keys() - {"key", "order", "sampler"}:
        with pytest.raises(CheckpointError, match=rf"manifest\.json .*`{name}`"):
            check_content(path, state, {key: value for key, value in facts.items() if key != name})
    with pytest.raises(CheckpointError, match=r"state\.json"):
        check_content(path, [1, 2], facts)
