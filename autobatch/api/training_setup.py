"""The setup and the batches of a training, in the process that trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autobatch.api.call import Call
from autobatch.api.stages import OPENING
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.distributed.shared_stream import open_stream, split_note
from autobatch.setup.session import SetupProcess
from autobatch.setup.setup import KeyValue, Role, Setup, open_setup
from autobatch.training.build import build_sampler, count_stream, depends_on_end, stream_length
from autobatch.workload.contract import Workload
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.streams import ENDLESS, count_samples


def open_to_train(call: Call, workload: Workload, shard: ShardLayout | None) -> Setup:
    """Open the setup for the training; rank 0 holds a model that ranks share."""
    call.progress.doing(OPENING)
    role = Role(world=call.ranks.world, shard=shard, holds_model=call.ranks.rank == 0, trains=True)
    return open_setup(workload, call.options, role, environ=call.environ, is_demo=call.workload is None)


def budgeted(setup: Setup, key: Mapping[str, KeyValue]) -> Setup:
    """Return a setup with the budget of a probe, as its key has it, so that training has the same."""
    budget_bytes = key.get("budget_bytes")
    return setup if budget_bytes is None else replace(setup, device=setup.device.budgeted(int(budget_bytes)))


def epoch_samples(call: Call, process: SetupProcess) -> int:
    """Return the samples of an epoch. A stream is counted only if the run depends on its end."""
    if process.info.epoch_samples is not None:
        return process.info.epoch_samples
    if not depends_on_end(call.options):
        return ENDLESS
    known = call.ranks.once(lambda: process.call("the length of the stream", stream_length))
    if known is not None:
        return known
    call.progress.note(
        "--epochs or --last-batch needs the number of samples, so the stream is read once to its end: give "
        "--steps if it has no end"
    )
    return call.ranks.once(lambda: process.call("counting the samples", count_stream))


def sampler_of(call: Call, setup: Setup, samples: int | None) -> GlobalBatchSampler:
    """Return the batches of the run; ``samples`` of an epoch of a stream are None if not counted yet."""
    options, ranks, stream = call.options, call.ranks, setup.stream
    if stream is None:
        samples, order = epoch_of(setup.workload, options.device.seed)
        return build_sampler(samples, options, order)
    if samples is None:
        samples = ranks.once(lambda: count_samples(stream)) if depends_on_end(options) else ENDLESS
    note = split_note(setup.workload.train_data[0], ranks)  # type: ignore[index]
    if note is not None:
        call.progress.note(note)
    return build_sampler(samples, options, view=open_stream(stream, ranks, options.device.seed))
