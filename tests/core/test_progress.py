"""The progress that ignores every event."""

from __future__ import annotations

import inspect

import pytest

from autobatch.core.progress import Progress

EVENTS = [name for name, one in vars(Progress).items() if inspect.isfunction(one)]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_ignored_without_output(event: str, capsys: pytest.CaptureFixture[str]) -> None:
    method = getattr(Progress(), event)
    assert method(*[object() for _ in inspect.signature(method).parameters]) is None
    assert capsys.readouterr() == ("", "")
