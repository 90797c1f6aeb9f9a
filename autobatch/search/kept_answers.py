"""Answers about real batches and their split, kept beside the limits that they belong to.

To trace a step at several sizes, to replay hundreds of batches and to measure the cost of micro-batches takes
seconds. The same question later has the same answer, so it is asked once. A kept cost also gives later runs
the same cut, which a new measurement would not.

The key of an answer is everything that it depends on: the key of the limit, the sizes of all samples, the
versions, and the bytes that the run of the limit allocated, because a model whose code changed allocates
others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, read_json
from autobatch.core.records.probe import Probe
from autobatch.core.version import __version__
from autobatch.device.profiles import profile_folder, save_or_explain
from autobatch.setup.setup import SetupInfo

SCHEMA = 1
T = TypeVar("T")


@dataclass(frozen=True)
class KeptAnswers:
    """The answers of one setup and limit in a data directory."""

    home: Path
    key: Mapping[str, Any]
    """Everything that answers depend on, besides the question."""

    def find(self, question: tuple[Any, ...], kind: type[T]) -> T | None:
        """Return the kept answer to a question; None if there is none that can be read."""
        try:
            found = read_json(self._path(question))
            return msgspec.convert(found["answer"], kind, strict=False)
        except (InputError, *UNREADABLE, KeyError, TypeError):
            return None

    def keep(self, question: tuple[Any, ...], answer: T) -> T:
        """Keep an answer, if the data directory is writable, and return it."""
        content = {"key": self._whole(question), "answer": answer}
        with suppress(InputError):
            text = msgspec.json.format(msgspec.json.encode(content, order="deterministic"))
            save_or_explain(self._path(question), text + b"\n")
        return answer

    def _whole(self, question: tuple[Any, ...]) -> dict[str, Any]:
        return {**self.key, "question": question, "schema": SCHEMA, "autobatch": __version__}

    def _path(self, question: tuple[Any, ...]) -> Path:
        content = msgspec.json.encode(self._whole(question), order="deterministic")
        folder = profile_folder(str(self.key.get("device")), user_dir=self.home)
        return folder / "ragged" / f"{hashlib.sha256(content).hexdigest()}.json"


def kept_answers(info: SetupInfo, probe: Probe, home: Path) -> KeptAnswers:
    """Open the answers of a setup whose limit was found.

    Args:
        info: the setup.
        probe: the limit, with the run that showed it.
        home: data directory.
    """
    alone = probe.micro_batch if probe.real_batches is None else probe.real_batches.micro_batch_alone
    peaks = [one.peak_allocated_bytes for one in probe.attempts if one.fits and one.micro_batch == alone]
    key = {**info.key, "sizes": info.sizes_digest, "limit": alone, "limit_bytes": peaks[:1]}
    return KeptAnswers(home, key)
