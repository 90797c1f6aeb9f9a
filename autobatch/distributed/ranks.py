"""The ranks of a run, as everything above sees them: the place that a launcher gives to each, and their plan.

`Ranks` is a group of one process, which needs no messages. `autobatch.distributed.group.Group` is a group of
any number of processes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.core.options import AtLeastOne, AtLeastZero
from autobatch.core.records import DeviceRecord, Probe, SizeCut

if TYPE_CHECKING:
    from torch import Tensor


VERDICT = "verdict.json"
"""File in the folder of a run over ranks that keeps the exit code of the newest attempt, if it failed."""
EARLIER_OUT = "AUTOBATCH_EARLIER_OUT"
"""Variable with the folder of a run that ``--ranks N`` starts again."""

T = TypeVar("T")


class Ranks:
    """The processes that train a batch together, seen from one of them; here, this process alone.

    All ranks make the same calls in the same order. A call that waits for the others raises `RankLost` if one
    of them has ended.
    """

    rank = 0
    """Place of this process, from 0. Rank 0 alone prints, and writes the files of the run."""
    world = 1
    """Number of ranks."""
    host = socket.gethostname()
    """Name of the host of this rank."""
    earlier_out: Path | None = None
    """Folder of the run that the launcher has started again; None for a first start."""
    out: Path | None = None
    """Folder of the run; None until it is known."""
    mark: Path | None = None
    """File in it that is there while no other start of a run has the folder; None until it is known."""

    def device(self, spec: str) -> str:
        """Return the device that this rank opens for the one that was asked for."""
        return spec

    def waiting(self, act: str) -> AbstractContextManager[None]:
        """Wait for the other ranks within the block.

        Args:
            act: the purpose, in the words that follow "could not".

        Raises:
            RankLost: a collective failed within the block; names the ranks that do not answer.
        """
        return nullcontext()

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in order of the ranks."""
        return [value]

    def broadcast(self, read: Callable[[], T]) -> T:
        """Return on every rank what a function returns on rank 0, which alone calls it."""
        return read()

    def agree(self, flag: bool) -> bool:
        """Return whether any rank gave True."""
        return any(self.gather(flag))

    def once(self, act: Callable[[], T]) -> T:
        """Run a function on rank 0 alone, for up to a day, and return its answer on every rank.

        What it raises is raised on rank 0, and ends the others.
        """
        return act()

    def check_equal(self, values: Mapping[str, object]) -> None:
        """Check that all ranks have the same values, which are named for the user.

        Raises:
            InputError: a rank differs; names the rank, the value and both of its forms.
        """
        first, *others = self.gather(dict(values))
        for rank, of_rank in enumerate(others, start=1):
            for name, expected in first.items():
                if of_rank.get(name) != expected:
                    raise InputError(
                        f"the ranks differ in {name}: rank {rank} has {of_rank.get(name)}, and rank 0 has "
                        f"{expected}. Start all of them alike"
                    )

    def sum(self, tensors: Sequence[Tensor], act: str) -> None:
        """Sum tensors over the ranks in place; ``act`` is the purpose, as follows "could not"."""

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the tensors that rank 0 has, in place.

        Raises:
            InputError: the tensors of a rank have other shapes.
        """

    def enter(self, out: Path, mark: Path) -> None:
        """Set the folder of the run, and its mark."""
        self.out, self.mark = out, mark

    def fail(self, line: str, code: int) -> int | None:
        """Tell all ranks, and the launcher, that the run ends with this line and exit code.

        Returns:
            The exit code of the rank that failed first, which has printed the cause; None if it is this one.
        """
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path:
            out = self.out and str(self.out.absolute())
            content = {"message": line, "timestamp": str(int(time.time())), "out": out}
            with suppress(OSError):  # a full disk must not hide the failure
                # Whole, because a launcher may read it as soon as any rank has ended, and fails on a part.
                write_atomic(Path(path), json.dumps(content).encode())
        return None

    def close(self) -> None:
        """Leave the ranks after all of them have ended well."""


class Launch(msgspec.Struct, frozen=True):
    """Place of this process among the ranks of a run, in the variables of torchrun."""

    rank: AtLeastZero = msgspec.field(name="RANK")
    world: AtLeastOne = msgspec.field(name="WORLD_SIZE")
    address: str = msgspec.field(name="MASTER_ADDR")
    port: AtLeastZero = msgspec.field(name="MASTER_PORT", default=29500)
    """Port of ``address`` at which the store of the run listens."""
    local_rank: AtLeastZero = msgspec.field(name="LOCAL_RANK", default=0)
    """Place among the ranks of this host."""
    local_world: AtLeastOne = msgspec.field(name="LOCAL_WORLD_SIZE", default=1)
    """Ranks on this host."""
    run_id: str = msgspec.field(name="TORCHELASTIC_RUN_ID", default="none")
    restart: AtLeastZero = msgspec.field(name="TORCHELASTIC_RESTART_COUNT", default=0)
    """Starts of the ranks before this one."""


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch from the environment; None if this process trains alone.

    Raises:
        InputError: a variable is missing or invalid.
    """
    world = launched_world(environ)
    if world == 1:
        return None
    try:
        launch = msgspec.convert(dict(environ), Launch, strict=False)
        if "LOCAL_RANK" not in environ:  # hosts are filled one after the other
            launch = msgspec.structs.replace(launch, local_rank=launch.rank % launch.local_world)
        wrong = f"RANK is {launch.rank}, and WORLD_SIZE is {world}"
    except msgspec.ValidationError as error:
        launch, wrong = None, str(error)
    if launch is None or launch.rank >= world:
        raise InputError(
            f"the environment describes no ranks ({wrong}): start them with "
            "torchrun --nproc-per-node N -m autobatch …"
        )
    return launch


def launched_world(environ: Mapping[str, str]) -> int:
    """Return the number of processes that a launcher has started, 1 without one.

    Raises:
        InputError: WORLD_SIZE is no whole number over 0.
    """
    found = environ.get("WORLD_SIZE", "1")
    if not found.isdecimal() or int(found) < 1:
        raise InputError(
            f"WORLD_SIZE must be a whole number over 0, found {found!r}: start ranks with torchrun"
        )
    return int(found)


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
