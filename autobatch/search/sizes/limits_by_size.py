"""The largest micro-batch of smaller samples: a curve over size by replay."""

from __future__ import annotations

import msgspec

from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import LengthLimit, Probe, UpperBoundBy
from autobatch.search import questions
from autobatch.search.one_probe import caps_of
from autobatch.search.sizes.real_batches import find_curve
from autobatch.setup.session import SetupProcess


def find_limits_by_size(
    process: SetupProcess,
    options: Options,
    found: Probe,
    *,
    progress: Progress,
) -> Probe:
    """Add the largest micro-batch of smaller samples, if sizes differ: a curve over size, by replay.

    Nothing is added if the step is no exact program of micro-batch and size. A limit on the tokens of a
    micro-batch follows: size times micro-batch, if that product is flat.

    Args:
        process: holds the setup.
        options: options of the run.
        found: the limit of the largest samples.
        progress: receives notes.
    """
    if not process.info.size_quartiles or found.stopped_by is not None:
        return found
    unit = process.info.size_unit
    cap = min(caps_of(process.info, options).values())
    progress.doing("computing the limits of smaller samples")
    try:
        curve = questions.ask_or_none(process, "a curve over size", find_curve, found.micro_batch, cap)
    except KeyboardInterrupt:
        progress.note("interrupted: left out the micro-batches of smaller samples")
        return found
    if curve is None:
        return found
    *points, (longest, limit) = curve
    lengths = [_length_limit(size, own, "cap" if own == cap else "replay") for size, own in points]
    lengths.append(_length_limit(longest, limit, found.upper_bound_by))
    return msgspec.structs.replace(found, lengths=lengths, size_unit=unit)


def _length_limit(size: float, micro_batch: int, upper_bound_by: UpperBoundBy | None) -> LengthLimit:
    return LengthLimit(
        size=size, micro_batch=micro_batch, upper_bound_by=upper_bound_by, padded_size=size * micro_batch
    )
