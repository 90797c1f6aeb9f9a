"""Text that is compared with a file beside the test; one command rewrites it.

``SNAPSHOTS=write python -m pytest tests/cli``, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path


def check_snapshot(path: Path, text: str) -> None:
    """Compare a text with a file, or write it if the environment says so."""
    if os.environ.get("SNAPSHOTS") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
