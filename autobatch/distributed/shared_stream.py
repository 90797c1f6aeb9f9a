"""The batches of a run; a stream is read by rank 0 for all ranks, so that they train on its samples.

Each batch is sent whole. A batch that runs again in other shares, or is split by size, needs no further
message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autobatch.core.options import Options
from autobatch.distributed.ranks import Ranks
from autobatch.workload.contract import Workload
from autobatch.workload.data import digest_of
from autobatch.workload.nested import map_tensors
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.streams import StreamSampler, length_of_stream


def open_sampler(workload: Workload, stream: Any, ranks: Ranks, options: Options) -> GlobalBatchSampler:
    """Return the batches of a run, which are the same on all ranks.

    Args:
        workload: has the data with an index.
        stream: the data without one; None if they have one.
        ranks: the processes that train together.
        options: the target batch, the seed, and the length of the run.

    Raises:
        InputError: the sampler of the workload is invalid, or a run over a stream has no number of steps.
    """
    lengths: dict[str, Any] = {
        name: getattr(options, name) for name in ("target_batch", "seed", "steps", "epochs")
    }
    if stream is None:
        samples, order = epoch_of(workload, options.seed)
        return GlobalBatchSampler(**lengths, samples=samples, order=order)

    def share(read: Callable[[], list[Any]]) -> list[Any]:
        return ranks.broadcast(map_tensors(read(), _alone) if ranks.rank == 0 else [])

    sampler = StreamSampler(**lengths, samples=length_of_stream(options.steps), stream=stream)
    if ranks.world > 1:
        sampler.share = share
    return sampler


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
