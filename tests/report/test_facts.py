"""The facts of a result in words: said once, of one mind with each other, for many kinds of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch.core.records import RunRecord, SizeCut, Tuning
from autobatch.planning import make_plan
from autobatch.report.facts import facts_of, final_facts
from tests.support.sample_run import a_run, some_rates


def changed(part: str, **changes: Any) -> RunRecord:
    """Return the sample run with some fields of one part changed."""
    run = a_run()
    return msgspec.structs.replace(run, **{part: msgspec.structs.replace(getattr(run, part), **changes)})


def probed(**changes: Any) -> RunRecord:
    run = changed("probe", **changes)
    return msgspec.structs.replace(run, plan=None, tuning=None, training=None, command=None)


CUT = SizeCut(longest=512.0, micro_batch=4, max_micro_batch=1024)
NO_GAIN = Tuning(trials=4, best_samples_per_s=1000.0, offers=["an offer"], learning_rate=some_rates())
RUNS: dict[str, tuple[RunRecord, str]] = {
    "a whole run": (a_run(), "at least 1.11 × faster: compile default"),
    "a limit that a run has shown": (
        probed(multiple=8),
        "93 samples at a time in 6.00 GiB; 101 ran",
    ),
    "a saved limit": (
        probed(source="saved 2026-11-02", upper_bound_by="replay"),
        "94 do not (saved on 2026-11-02, confirmed by one run)",
    ),
    "a cap": (probed(limited_by="dataset", upper_bound_by="cap"), "all samples of the data"),
    "ranks that share the model": (probed(world_size=2, parallel="shard"), "which share the model"),
    "a split by size": (changed("plan", split="size", size_cut=CUT), "micro-batches cut by size"),
    "no gain": (a_run(tuning=NO_GAIN), "kept the default, 1,000 samples/s"),
    "a training with incidents": (
        changed("training", skipped_steps=2, oom_recoveries=3, validation={}, final_terms={"boxes": 0.31}),
        "2 steps skipped, 3 recoveries from out of memory, micro-batch 64 at the end",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_fact_is_said_once_and_what_answers_the_question_comes_first(name: str) -> None:
    run, words_of_it = RUNS[name]
    facts = facts_of(run, out=Path("runs/one"))
    assert words_of_it in "\n".join(fact.text for fact in facts)
    labels = [fact.label for fact in facts if fact.label]
    assert len(labels) == len(set(labels))
    kinds = [fact.kind for fact in final_facts(run, out=Path("runs/one"))]
    assert kinds == sorted(kinds, key=lambda kind: kind != "main")
    assert "more" not in kinds


def test_a_limit_of_another_configuration_is_not_shown_beside_the_plan() -> None:
    """The probe ran in fp32; the tuned plan trains in bf16, where more fits."""
    plan = make_plan(target_batch=1024, micro_batch_limit=342, learning_rate=0.1, precision="bf16")
    run = msgspec.structs.replace(changed("probe", precision="fp32"), plan=plan)
    assert final_facts(run)[0].text == "342 samples at a time in 6.00 GiB as tuned, 93 before"
