"""A short run of ranks that share a model, in the sessions of their children.

Every run begins with the weights that training would begin with: rank 0 keeps the model in host memory, and
sends each rank its part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import nn

from autobatch.device.base import Meter
from autobatch.distributed.shares import RankSplit
from autobatch.search.confirm import meet, share_of
from autobatch.setup.attempt import TrainSetup, open_train_state
from autobatch.setup.child import Session
from autobatch.setup.model import build_shared_model
from autobatch.tuning.lr_trial import Losses, LrTrialSpec, ModelInTraining, configured, guarded, train
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.split import CountSplit

if TYPE_CHECKING:
    from autobatch.distributed.meeting import Children, MeetingPlace


class Meeting(NamedTuple):
    """The meeting of all ranks for a run: plain values."""

    place: MeetingPlace
    limits: list[int]
    """The largest micro-batch of each rank."""
    seed: int
    """Of the first weights."""


@dataclass(frozen=True)
class FirstModel:
    """The model that every run begins with: in host memory on rank 0, without any on the others."""

    model: nn.Module


def keep_first_model(session: Session, rank: int, seed: int) -> None:
    """Keep the model that every run begins with in a session, unless it is there."""
    if session.find(FirstModel) is not None:
        return
    setup = session.setup
    assert setup.layout is not None
    if rank == 0 and any(parameter.is_meta for parameter in setup.model.parameters()):
        with preserved_random_state():
            seed_everything(seed)
            model = build_shared_model(setup.workload, setup.layout.modules, holds_model=True, trains=True)
        session.keep(FirstModel(model))
    else:
        session.keep(FirstModel(setup.model))


def joint_run(session: Session, task: LrTrialSpec, rate: float, seed: int, meeting: Meeting) -> Losses:
    """Train together with the sessions of the other ranks; all of them call it.

    Args:
        session: holds the setup of this rank.
        task: what to train.
        rate: the learning rate.
        seed: of the order of the data and of the model's random numbers.
        meeting: of the ranks.

    Raises:
        Exception: whatever the workload raises at the default learning rate, except out of memory.
    """
    losses = _train_together(session, task, rate, seed, meeting)
    return guarded(losses, session.setup.device, is_default=rate == task.default)


def _train_together(session: Session, task: LrTrialSpec, rate: float, seed: int, meeting: Meeting) -> Losses:
    setup = configured(session.setup, task)
    task = task._replace(micro_batch=meeting.limits[meeting.place.rank])
    first = session.find(FirstModel)
    assert first is not None
    with meet(session, meeting.place) as children:
        try:
            with preserved_random_state(), setup.device.training() as meter:
                training = _open(setup, first.model, children, meeting, meter=meter, rate=rate)
                yield from train(setup, task, training, seed)
        except GeneratorExit:
            # No failure, which would end the children of the others: all ranks close their runs at once.
            return


def _open(
    setup: TrainSetup, first: nn.Module, children: Children, meeting: Meeting, *, meter: Meter, rate: float
) -> ModelInTraining:
    """Return a model that the ranks share, with its first weights, and what trains it."""
    # Importing FSDP takes a second, which a run without it saves.
    from autobatch.distributed.group import Group
    from autobatch.distributed.sharding.build import shard_over

    assert setup.layout is not None
    device = setup.device.torch_device
    # Of a model that is never whole, each rank draws its part.
    seed_everything(meeting.seed)
    with meter.uncounted():
        # It needs what a group and its children have in common.
        group = cast(Group, children)
        model, shared = shard_over(group, setup.layout, first, setup.precision, device, keeps_model=True)
    train_state = open_train_state(replace(setup, model=model), meter, learning_rate=rate)
    shared.attach(train_state)
    split = RankSplit(CountSplit(), meeting.place.rank, meeting.limits)
    return ModelInTraining(train_state, meter, share_of(setup, children, split, train_state), split)
