"""The plan of a batch over ranks: what fits on all of them."""

from __future__ import annotations

import msgspec

from autobatch.core.records import DeviceRecord, Probe, SizeCut
from autobatch.distributed.ranks import Ranks


def agree_on_limit(
    ranks: Ranks, probe: Probe, planned: int, device: DeviceRecord
) -> tuple[Probe, int, str | None]:
    """Return the least limit of all ranks, which holds for all of them; all of them call it.

    Args:
        ranks: the processes that train together.
        probe: of this rank.
        planned: the largest micro-batch that a plan may ask for on this rank.
        device: of this rank.

    Returns:
        The probe of the rank with the least limit, what a plan may ask for on each rank, and a note that
        names the smallest GPU if the limits differ.
    """
    of_ranks = ranks.gather((probe, planned, f"{device.name} on {ranks.host}"))
    rank, (least, _, where) = min(enumerate(of_ranks), key=lambda item: item[1][0].micro_batch)
    largest = max(other.micro_batch for other, _, _ in of_ranks)
    note = (
        f"all ranks take micro-batches of at most {least.micro_batch:,}, as fit on rank {rank} ({where}), "
        f"although {largest:,} fit on others"
    )
    agreed = msgspec.structs.replace(least, world_size=ranks.world)
    return agreed, min(own for _, own, _ in of_ranks), note if least.micro_batch < largest else None


def agree_on_cut(ranks: Ranks, cut: SizeCut | None) -> SizeCut | None:
    """Return the cut with the least limits of any rank; all of them call it.

    None if a rank splits by count, or has other samples.
    """
    cuts = [known for known in ranks.gather(cut) if known is not None]
    if len(cuts) < ranks.world or len({known.digest for known in cuts}) > 1:
        return None
    return msgspec.structs.replace(
        cuts[0],
        micro_batch=min(known.micro_batch for known in cuts),
        max_micro_batch=min(known.max_micro_batch for known in cuts),
    )
