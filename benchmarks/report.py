"""The hardware, versions and date of a benchmark, and the folder of the results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def surroundings(*distributions: str) -> dict[str, Any]:
    """Return hardware, versions, date and load."""
    from importlib.metadata import PackageNotFoundError, version

    from autobatch.device.host import cpu_name, host_memory

    versions = {"python": platform.python_version()}
    for name in ("torch-autobatch", "torch", *distributions):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_bytes": host_memory().total_bytes},
        "load_before": os.getloadavg()[0],
        "versions": versions,
    }


def save(topic: str, content: dict[str, Any], table: str) -> Path:
    """Write the figures as JSON and the table as Markdown, named by topic, hardware and date."""
    slug = re.sub(r"[^a-z0-9]+", "-", content["hardware"]["cpu"].lower()).strip("-")
    path = RESULTS / f"{topic}_{slug}_{content['date']}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(table)
    return path
