"""Random wrong inputs end in one line and exit 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.wrong_inputs import MAKERS, ask, wrong_inputs


@pytest.mark.program
@pytest.mark.filterwarnings("default")
def test_sixty_wrong_inputs_are_refused_in_one_line(tmp_path: Path) -> None:
    answers = []
    for index, asked in enumerate(wrong_inputs(60, seed=7)):
        folder = tmp_path / str(index)
        folder.mkdir()
        answers.append(ask(asked, folder))
    assert {answer.asked.kind for answer in answers} == {
        make.__name__.removeprefix("wrong_") for make in MAKERS
    }
    assert [answer for answer in answers if answer.faults] == []
