"""A stream that rank 0 reads for all ranks, so that they train on the samples of one process.

Each batch is sent whole. A batch that runs again in other shares, or is split by size, needs no further
message.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autobatch.distributed.ranks import Ranks
from autobatch.workload.contract import BatchFunction
from autobatch.workload.data_digest import digest_of
from autobatch.workload.nested import map_tensors
from autobatch.workload.streams import FunctionReader, Reader, StreamReader


class SharedReader:
    """The samples that rank 0 reads, on every rank; all ranks make each call."""

    def __init__(self, source: Reader, ranks: Ranks) -> None:
        self._source, self._ranks = source, ranks

    def read(self, number: int) -> list[Any]:
        """See `Reader.read`."""
        own = [] if self._ranks.rank else self._source.read(number)
        return self._ranks.broadcast(map_tensors(own, _alone))

    def skip(self, samples: int) -> None:
        """See `Reader.skip`."""
        if not self._ranks.rank:
            self._source.skip(samples)

    def read_with(self, **workers: Any) -> None:
        """See `Reader.read_with`."""
        self._source.read_with(**workers)

    def state_dict(self) -> dict[str, Any]:
        """See `Reader.state_dict`."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """See `Reader.load_state_dict`."""
        return ["rank 0 reads the stream"] if self._ranks.rank else self._source.load_state_dict(state)


def open_stream(stream: Any, ranks: Ranks, seed: int, target_batch: int) -> Reader:
    """Return what reads a stream in a run with a seed, or asks a function for target batches."""
    is_function = isinstance(stream, BatchFunction)
    reader = FunctionReader(stream, target_batch, seed) if is_function else StreamReader(stream, seed)
    return reader if ranks.world == 1 else SharedReader(reader, ranks)


def split_note(first_sample: Any, ranks: Ranks) -> str | None:
    """Return a remark if the stream of each rank begins with another sample; all ranks call it."""
    if len(set(ranks.gather(digest_of(first_sample)))) == 1:
        return None
    return (
        "the stream begins with another sample on each rank. Rank 0 reads it for all ranks, so it must not "
        "be split by rank, or only the part of rank 0 is trained"
    )


def _alone(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, without the memory that it is a part of, which would be sent too."""
    return tensor.detach().cpu().clone()
