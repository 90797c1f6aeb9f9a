"""Building blocks of the options: descriptions of values, and messages about unknown names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from autobatch.core.option_types import (
    AtLeastOne,
    AtLeastZero,
    Decay,
    OptionHelp,
    Positive,
    Seed,
    choices_of,
    expected,
    help_of,
    plain_type,
    unknown_option,
)

HELP = OptionHelp("Text.", "run", "N")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (int, "a whole number"),
        (str | int | None, "text or a whole number"),
        (AtLeastOne, "a whole number of 1 or more"),
        (AtLeastZero | None, "a whole number of 0 or more"),
        (Annotated[AtLeastOne, HELP], "a whole number of 1 or more"),
        (Annotated[AtLeastOne | None, HELP], "a whole number of 1 or more"),
        (Annotated[Seed, HELP], "a whole number from 0 to 2147483647"),
        (Positive, "a number over 0"),
        (Annotated[Decay | None, HELP], "a number over 0 and under 1"),
        (Annotated[Literal["a", "b"], HELP], "one of a, b"),
        (Annotated[list[str], HELP], "one or more names"),
    ],
)
def test_the_expected_values_are_described(annotation: Any, words: str) -> None:
    assert expected(annotation) == words


@pytest.mark.parametrize(
    ("number", "annotation", "is_valid"),
    [(0, AtLeastOne, False), (1, AtLeastOne, True), (0, AtLeastZero, True), (2**31, Seed, False),
     (0.0, Positive, False), (1.0, Decay, False), (0.5, Decay, True)],
)  # fmt: skip
def test_the_ranges_are_those_of_their_names(number: float, annotation: Any, is_valid: bool) -> None:
    if is_valid:
        assert msgspec.convert(number, annotation) == number
    else:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(number, annotation)


def test_the_help_of_a_field_is_found_beside_its_type() -> None:
    class Some(msgspec.Struct):
        switch: Annotated[bool, HELP] = False
        choice: Annotated[Literal["a", "b"], HELP] = "a"

    switch, choice = msgspec.structs.fields(Some)
    assert help_of(switch) == help_of(choice) == HELP
    assert (plain_type(switch.type), choices_of(switch.type)) == (bool, ())
    assert choices_of(choice.type) == ("a", "b")


def test_an_unknown_name_gets_the_nearest_one_or_all() -> None:
    names = ["steps", "epochs"]
    assert unknown_option("stpes", names) == "there is no option stpes; did you mean steps?"
    assert unknown_option("zzz", names) == "there is no option zzz; there are: epochs, steps"
