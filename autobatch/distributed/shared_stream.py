"""A stream that rank 0 reads for all ranks, so that they train on the samples of one process.

Each batch is sent whole. A batch that runs again in other shares, or is split by size, needs no further
message. The samples are read as tensors and plain values.
"""

from __future__ import annotations

import _codecs
import hashlib
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from autobatch.core.errors import InputError
from autobatch.distributed.ranks import Ranks
from autobatch.workload.nested import map_tensors
from autobatch.workload.streams import FunctionReader, StreamReader, StreamView, reader_of


class SharedStream(StreamView):
    """A stream as data with an index that only moves forward, on every rank.

    Args:
        source: reads the stream; asked on rank 0 alone.
        ranks: the ranks.
    """

    def __init__(self, source: StreamReader | FunctionReader, ranks: Ranks) -> None:
        super().__init__(source)
        self._ranks = ranks

    def _read(self, number: int) -> list[Any]:
        """Send the samples of a batch from rank 0 to all; all ranks call it."""
        samples = [] if self._ranks.rank else super()._read(number)
        content = self._ranks.broadcast(b"" if self._ranks.rank else pack(samples))
        return unpack(content) if self._ranks.rank else samples

    def skip(self, samples: int) -> None:
        """See `StreamView.skip`."""
        if not self._ranks.rank:
            super().skip(samples)

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """See `StreamView.load_state_dict`."""
        return ["rank 0 reads the stream"] if self._ranks.rank else super().load_state_dict(state)


def open_stream(stream: Any, ranks: Ranks, seed: int, target_batch: int) -> StreamView:
    """Return a stream as data with an index, which all ranks of a run with this seed read together."""
    source = reader_of(stream, seed, target_batch)
    return StreamView(source) if ranks.world == 1 else SharedStream(source, ranks)


def split_note(first_sample: Any, ranks: Ranks) -> str | None:
    """Return a remark if the stream of each rank begins with another sample; all ranks call it."""
    if len(set(ranks.gather(hashlib.sha256(pack(first_sample)).hexdigest()))) == 1:
        return None
    return (
        "the stream begins with another sample on each rank. Rank 0 reads it for all ranks, so it must not "
        "be split by rank, or only the part of rank 0 is trained"
    )


def pack(samples: Any) -> bytes:
    """Return samples as bytes for `unpack`, without the memory that a tensor is a part of.

    Raises:
        InputError: they hold something else than tensors, arrays and plain values.
    """
    file = io.BytesIO()
    torch.save(map_tensors(samples, _compact), file)
    file.seek(0)
    with safe_globals(_numpy_globals()):
        foreign = sorted(get_unsafe_globals_in_checkpoint(file))
    if foreign:
        raise InputError(
            "rank 0 sends the samples of a stream to the other ranks as tensors, NumPy arrays, numbers, text "
            f"and bytes in dicts, lists and tuples, found {foreign[0]}: convert it where the stream yields it"
        )
    return file.getvalue()


def unpack(content: bytes) -> Any:
    """Return samples from their bytes."""
    with safe_globals(_numpy_globals()):
        return torch.load(io.BytesIO(content), weights_only=True)


def _numpy_globals() -> list[Any]:
    """Return the functions and classes that make arrays, beside those that torch allows by itself."""
    kinds = [type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"]
    makers = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    return [np.ndarray, np.dtype, _codecs.encode, *makers, *dict.fromkeys(kinds)]


def _compact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
