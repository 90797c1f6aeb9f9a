"""Files of a run that its training writes, and its report reads or names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from autobatch.core.files import UNREADABLE
from autobatch.core.records import StepRecord

METRICS = "metrics.jsonl"
WEIGHTS = "model.safetensors"
AVERAGED_WEIGHTS = "model-ema.safetensors"
"""The averages in place of the weights, with the buffers of the model."""
RESULT = "result.json"
REPORT = "report.html"


def read_steps(path: Path) -> Iterator[tuple[bytes, StepRecord]]:
    """Yield the lines of a file of metrics and their records; leave out what a killed run wrote in part."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(*UNREADABLE):
            yield line, msgspec.json.decode(line, type=StepRecord)
