"""The environment in which a program records its GPU memory; see `autobatch.integrations.recorder`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

EXTENSION = Path(__file__).parent / "recorder"
"""Folder of the module that torch loads, and of the entry point by which torch finds it."""


def recorded(**wanted: Any) -> dict[str, str]:
    """Return the environment of this process, in which each process of a program records as is wanted."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(EXTENSION), os.environ.get("PYTHONPATH")])),
        "AUTOBATCH_RECORDER": json.dumps(wanted),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }
