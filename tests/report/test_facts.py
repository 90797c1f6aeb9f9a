"""Every fact of a result in words: `facts.txt` has them, for many kinds of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch import Plan
from autobatch.core.records import (
    Estimate,
    LimitedBy,
    RealBatches,
    RunRecord,
    SizeCut,
    Trial,
    Tuning,
)
from autobatch.planning import make_plan
from autobatch.report import words
from autobatch.report.facts import (
    describe_estimate,
    describe_trial,
    facts_of,
    final_facts,
    headline,
    tiles_of,
)
from tests.support.sample_run import a_device, a_run, an_estimate, some_rates
from tests.support.snapshots import check_snapshot


def changed(part: str, run: RunRecord | None = None, **changes: Any) -> RunRecord:
    """Return the sample run with some fields of one part changed."""
    run = run or a_run()
    return msgspec.structs.replace(run, **{part: msgspec.structs.replace(getattr(run, part), **changes)})


def probed(**changes: Any) -> RunRecord:
    bare = a_run(plan=None, tuning=None, training=None, command=None)
    return changed("probe", bare, **changes)


def planned(plan: Plan | None = None, **changes: Any) -> RunRecord:
    made = plan or make_plan(target_batch=1024, micro_batch_limit=93, learning_rate=0.1)
    return a_run(plan=msgspec.structs.replace(made, **changes), tuning=None, training=None, command=None)


def tuned(**changes: Any) -> RunRecord:
    known: dict[str, Any] = {
        "trials": 4, "best": {"precision": "bf16"}, "baseline_samples_per_s": 1000.0,
        "best_samples_per_s": 1370.0, "study": "s", "seconds": 10.0, "low": 1.29, "high": 1.45,
        "changes": {"precision": "bf16"},
    }  # fmt: skip
    plan = make_plan(target_batch=1000, micro_batch_limit=93, learning_rate=0.1)
    return a_run(plan=plan, tuning=Tuning(**(known | changes)), training=None, command=None)


CUT = SizeCut(
    longest=512.0, micro_batch=4, max_micro_batch=1024, padding=1.25, padding_by_count=2.5, steps=8.9,
    steps_by_count=12.0,
)  # fmt: skip
DIVERGED = msgspec.structs.replace(some_rates(), default_loss=None)
RUNS: dict[str, RunRecord] = {
    "a whole run": a_run(),
    "a run on the CPU with little known": a_run(
        device=a_device(kind="cpu", name="AMD EPYC", holders=[], notes=[], other_processes_bytes=None),
        probe=None, tuning=None, training=None, metrics=[], command=None,
    ),
    "a device alone": RunRecord(device=a_device()),
    "a limit that a run has shown": probed(precision="bf16"),
    "a limit that a replay has shown": probed(upper_bound_by="replay", oom_count=0),
    "a limit for another reason": probed(upper_bound_by="error"),
    "a search that was stopped": probed(upper_bound_by=None, stopped_by="time limit"),
    "a saved limit": probed(source="saved 2026-11-20"),
    "a size that was asked about": probed(source="asked", micro_batch=1),
    **{f"a cap by {cap}": probed(limited_by=cap, upper_bound_by="cap") for cap in LimitedBy.__args__},  # type: ignore[attr-defined]
    "a limit on ranks": probed(world_size=2, parallel="replicate"),
    "a limit on ranks that share the model": probed(world_size=2, parallel="shard"),
    "real batches": probed(real_batches=RealBatches(batches=6, micro_batch_alone=120)),
    "real batches at the limit": probed(real_batches=RealBatches(batches=6, micro_batch_alone=93)),
    "real batches that do not fit": probed(real_batches=RealBatches(batches=0, micro_batch_alone=120)),
    "one micro-batch": planned(make_plan(target_batch=93, micro_batch_limit=93, learning_rate=1e-5)),
    "ranks": planned(make_plan(target_batch=1024, micro_batch_limit=93, learning_rate=0.1, world_size=2)),
    "a rule for the learning rate": planned(
        make_plan(target_batch=1024, micro_batch_limit=93, learning_rate=0.1, rule="sqrt", base_batch=256)
    ),
    "a small base batch": planned(
        make_plan(target_batch=1_000_000, micro_batch_limit=93, learning_rate=0.1, base_batch=64)
    ),
    "a tuned configuration": planned(
        knobs={"optimizer": "fused", "channels_last": True, "loader_workers": 2, "pin_memory": False},
        learning_rate=0.3, learning_rate_rule="tuned", learning_rate_factor=3.0, precision="bf16",
    ),
    "a split by size": planned(split="size", size_cut=CUT),
    "a split by size on ranks": planned(split="size", size_cut=CUT, world_size=2),
    "a gain": tuned(),
    "no gain": tuned(best_samples_per_s=1000.0, low=None, high=None, offers=["an offer", "another"]),
    "speeds that could not be measured": tuned(trials=0, best_samples_per_s=0.0, low=None, high=None),
    "a learning rate that was kept": tuned(learning_rate=msgspec.structs.replace(some_rates(), best=3e-4)),
    "a learning rate that diverged": tuned(learning_rate=DIVERGED),
    "a training without held-out data": changed("training", validation={}),
    "a training without losses": changed("training", validation={}, first_loss=None, samples_per_s=None),
    "a training with incidents": changed(
        "training", skipped_steps=2, oom_recoveries=3, ema=0.999,
        validation={"loss": 0.1017, "accuracy": 0.9722, "f1": None},
        resumed_from="checkpoints/step-00000040", peak_reserved_bytes=3 << 30,
    ),
}  # fmt: skip
TRIALS = [
    describe_trial(Trial(number=1, **trial), {"precision": "bf16"})
    for trial in (
        {"samples_per_s": 1234.5, "relative": 1.25},
        {"samples_per_s": 1234.5, "relative": 0.98},
        {"samples_per_s": None, "note": "too large"},
    )
]
ESTIMATES: dict[str, Estimate] = {
    "one GPU": an_estimate(),
    "a GPU that is too small": an_estimate(fits=False, micro_batch=0, plan=None),
    "ranks": an_estimate(world_size=8, parallel="shard"),
}


def written(run: RunRecord) -> list[str]:
    lines = [headline(run), *(" | ".join(tile) for tile in tiles_of(run))]
    facts = facts_of(run, out=Path("runs/one"), report=Path("runs/one/report.html"))
    return [*lines, *(f"{one.part:<9}{one.kind:<7}{one.label:<14}{one.text}".rstrip() for one in facts)]


def test_every_fact_reads_as_it_did() -> None:
    """Of each further kind, the file has the lines that the first one lacks."""
    parts, known = [], list[str]()
    for name, run in RUNS.items():
        lines = [line for line in written(run) if line not in known]
        parts.append("\n".join([f"## {name}", *lines]))
        known = known or lines
    parts += [f"## an estimate: {name}\n{describe_estimate(one)}" for name, one in ESTIMATES.items()]
    default = describe_trial(Trial(number=0, samples_per_s=10.0), {})
    parts.append("\n".join(["## trials", default, *TRIALS]))
    check_snapshot(Path(__file__).with_name("facts.txt"), "\n\n".join(parts) + "\n")


@pytest.mark.parametrize("name", RUNS)
def test_a_fact_is_said_once_and_as_people_say_it(name: str) -> None:
    facts = facts_of(RUNS[name], out=Path("runs/one"))
    labels = [fact.label for fact in facts if fact.label]
    assert len(labels) == len(set(labels))
    final = final_facts(RUNS[name], out=Path("runs/one"))
    kinds = [fact.kind for fact in final]
    assert kinds == sorted(kinds, key=lambda kind: kind != "main"), "what answers the question comes first"
    assert {fact.kind for fact in final} <= {"main", "detail", "path"}
    text = " ".join(fact.text for fact in facts) + headline(RUNS[name])
    assert "e+" not in text
    assert "1 ÷" not in text


def test_no_tile_denies_a_split_by_size() -> None:
    tiles = tiles_of(RUNS["a split by size"])
    assert tiles[0].note == "exactly, in about 8.9 micro-batches"
    assert not any("accumulation" in tile.note or "in 12 micro-batches" in tile.note for tile in tiles)


def test_a_limit_of_another_configuration_is_not_shown_beside_the_plan() -> None:
    """The probe ran in fp32; the tuned plan trains in bf16, where more fits."""
    plan = make_plan(target_batch=1024, micro_batch_limit=342, learning_rate=0.1, precision="bf16")
    run = changed("probe", a_run(plan=plan, tuning=None, training=None), precision="fp32")
    assert final_facts(run)[0].text == "342 samples at a time in 6.00 GiB as tuned, 93 before"
    assert "93" not in tiles_of(run)[1].note


def test_numbers_and_choices_in_words() -> None:
    numbers = (None, 0, 0.00012345, 1234.5, 123456.7, 2)
    assert [*map(words.decimal, numbers)] == ["unknown", "0", "0.0001234", "1,234", "123,457", "2"]
    assert [words.plural(n, "recovery", "recoveries") for n in (0, 1)] == ["0 recoveries", "1 recovery"]
    assert [words.percent(share) for share in (0.314, -0.02, -0.001)] == ["31 %", "-2 %", "0 %"]
    ratios = [words.ratio_in_words(ratio) for ratio in (1.31, 0.98, 1.001)]
    assert ratios == ["31 % faster", "2 % slower", "as fast"]
    held_out = {"loss": None, "accuracy": 0.9722, "f1": 0.1017}
    assert words.metrics_in_words(held_out) == ["accuracy 97.22 %", "f1 0.1017", "loss not finite"]
    chosen = {"precision": "bf16", "channels_last": True, "micro_batch_shift": 1, "loader_workers": 1}
    assert words.knobs_in_words(chosen) == "bf16, channels-last, micro-batch halved, 1 loader worker"
    assert words.knobs_in_words({"compile": "off", "pin_memory": False}) == "not compiled, no pin-memory"
