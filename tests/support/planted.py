"""Text and pickles that do harm where nothing protects."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLANTED = "\x1b]0;title\x07\x9b31m\u202e\r\n<script>alert(1)</script>"
"""Text that changes the title and colour of a terminal, turns a line around, ends it, and runs in a page."""


class Calling:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, Any]:
        return self._call


def payloads(sentinel: Path) -> Iterator[bytes]:
    """Yield pickles that make a file if anything executes them."""
    calls = (
        Calling(Path.touch, sentinel),
        Calling(os.system, f"touch '{sentinel}'"),
        Calling(exec, f"open({str(sentinel)!r}, 'w').close()"),
    )
    for call in calls:
        for protocol in range(2, 6):
            yield pickle.dumps(call, protocol=protocol)
            yield pickle.dumps({"counters": {"batches_seen": 3}, "model": call}, protocol=protocol)
