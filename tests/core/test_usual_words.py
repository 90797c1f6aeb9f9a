"""Words of other tools, answered with what does the same."""

from __future__ import annotations

import pytest

from autobatch.cli.main import run
from autobatch.core.check_options import options_from
from autobatch.core.errors import InputError
from autobatch.core.options import all_fields, fields_of
from autobatch.core.usual_words import USUAL, answer_to


@pytest.mark.parametrize("word", USUAL)
def test_every_answer_names_an_option_that_exists_and_the_word_is_none(word: str) -> None:
    known = all_fields().keys()
    assert word not in known or USUAL[word][0].option is None
    assert {option for option, _ in USUAL[word]} - {None} <= known
    assert answer_to(f"--{word.replace('_', '-')}", fields_of("fit"), str) is not None


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ("fit", "--batch-size", "64"),
            "there is no option --batch-size; give --target-batch N, the samples",
        ),
        (
            ("probe", "--batch-size", "64"),
            "there is no option --batch-size; give --micro-batch N to try a size",
        ),
        (("fit", "--lr", "0.1"), "the learning rate is Workload(learning_rate=…), and --tune-lr searches"),
        (("probe", "--lr", "0.1"), "the learning rate is Workload(learning_rate=…)\n"),
        (("fit", "--fsdp"), "there is no option --fsdp; give --parallel shard"),
        (("tune", "--fsdp"), "there is no option --fsdp; give --parallel shard"),
        (("estimate", "--fsdp"), "there is no option --fsdp; give --parallel shard"),
        (("fit", "--no-tune"), "there is no option --no-tune; give --trials 0"),
        (("fit", "--batch=4"), "give --target-batch N"),
    ],
)
def test_the_command_line_answers_usual_words(
    words: tuple[str, ...], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(words)) == 2
    assert answer in capsys.readouterr().err


def test_a_call_answers_usual_words_with_its_keyword() -> None:
    with pytest.raises(InputError, match=r"no option batch_size; give target_batch N, the samples of one"):
        options_from("fit", {"batch_size": 64})
    assert answer_to("colour", (), str) is None
