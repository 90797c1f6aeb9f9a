"""Kept answers: found again under the same key alone, and harmless where they cannot be kept or read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autobatch.core.records.plan import MicroBatchCost, SizeCut
from autobatch.core.records.probe import Attempt, Probe
from autobatch.search.kept_answers import KeptAnswers, kept_answers
from autobatch.search.sizes.plan_split import SplitChoice
from autobatch.search.sizes.real_batches import Order, Survivor
from autobatch.setup.child import ThisProcess
from tests.support.ragged import Sequences, ragged_workload
from tests.support.training import make_setup

KEY = {"device": "a device", "model": "m"}
CUT = SizeCut(
    sizes=[2.0, 9.5], micro_batches=[8, 3], limits_by="replay", cost=MicroBatchCost(fixed=0.1 + 0.2)
)


def test_an_answer_comes_back_as_it_was(tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path, KEY)
    for answer in (Survivor(3, 300, True), SplitChoice(CUT, "a note", True), SplitChoice(None, None)):
        question = (type(answer).__name__, Order(8, 0), answer)
        assert kept.find(question, type(answer)) is None
        kept.keep(question, answer)
        assert KeptAnswers(tmp_path, dict(KEY)).find(question, type(answer)) == answer


def test_another_key_or_question_finds_nothing(tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path, KEY)
    kept.keep(("survivor", Order(8, 0)), Survivor(3, 300, True))
    assert kept.find(("survivor", Order(8, 1)), Survivor) is None
    assert KeptAnswers(tmp_path, {**KEY, "model": "n"}).find(("survivor", Order(8, 0)), Survivor) is None


def test_a_damaged_file_counts_as_absent_and_a_file_in_the_way_is_no_error(tmp_path: Path) -> None:
    kept, question = KeptAnswers(tmp_path, KEY), ("survivor", Order(8, 0))
    kept.keep(question, Survivor(3, 300, True))
    (file,) = tmp_path.rglob("ragged/*.json")
    for damage in ("", "[]", "{}", '{"answer": {"micro_batch": "x"}}', '{"answer": [1]}'):
        file.write_text(damage)
        assert kept.find(question, Survivor) is None
    (tmp_path / "blocked").write_text("")
    assert KeptAnswers(tmp_path / "blocked", KEY).keep(question, Survivor(3, 300, True)).micro_batch == 3


def test_the_key_has_the_sizes_and_the_bytes_of_the_limit(tmp_path: Path) -> None:
    def key(probe: Probe, **changes) -> dict:
        info = ThisProcess(make_setup(ragged_workload(**changes))).info
        return dict(kept_answers(info, probe, tmp_path).key)

    one = Attempt(micro_batch=4, fits=True, peak_allocated_bytes=10, peak_reserved_bytes=None, seconds=0.0)
    probe = Probe(
        micro_batch=4, limited_by="memory", upper_bound_by="run", predicted_micro_batch=None, oom_count=0,
        attempts=[one],
    )  # fmt: skip
    grown = msgspec.structs.replace(probe, attempts=[msgspec.structs.replace(one, peak_allocated_bytes=11)])
    assert key(probe) == key(probe)
    assert key(probe) != key(grown)
    assert key(probe) != key(probe, train_data=Sequences(samples=49))
