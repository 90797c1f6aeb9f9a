"""Agreement of the ranks of a run before they train: options, data and the folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from autobatch.api.run import Run
from autobatch.core.errors import InputError
from autobatch.core.files import clean_unfinished
from autobatch.core.text import error_text
from autobatch.core.version import versions
from autobatch.distributed.launch import open_ranks
from autobatch.distributed.ranks import VERDICT, Ranks
from autobatch.training.checkpoint import Loaded, list_checkpoints
from autobatch.training.run_folder import CHECKPOINTS, FolderTakenError, claim_folder, named_failures
from autobatch.workload.data_digest import DataDigest, check_same_data

SHARED_SECONDS = 30.0
"""Longest wait until a file of rank 0 shows on every rank; network file systems keep listings for a while."""
OWN_OPTIONS = ("device", "memory_budget", "json", "quiet", "verbose")
"""Options in which ranks may differ."""


@contextmanager
def joined_ranks(environ: Mapping[str, str]) -> Iterator[Ranks]:
    """Join the ranks of the launcher within the block; an exception there ends all of them.

    Raises:
        InputError: the environment describes no launch.
        EarlierVerdict: an earlier start of the same run ended for good.
    """
    ranks = open_ranks(environ)
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(error_text(error), getattr(error, "exit_code", 1))
        raise
    ranks.close()


def agree_on_options(run: Run) -> None:
    """Check that the ranks can do what was asked for, and settle the device of this rank.

    Raises:
        InputError: they cannot, or ranks differ in an option or a version.
    """
    options, world = run.options, run.ranks.world
    asked = options.ranks
    is_count_wrong = asked not in (None, world)
    for is_wrong, message in (
        (
            is_count_wrong and world == 1,
            f"ranks is {asked}, and a call cannot start processes: use the command with --ranks "
            f"{asked}, or start the script with torchrun --nproc-per-node {asked}",
        ),
        (
            is_count_wrong,
            f"--ranks is {asked}, and torchrun started {world}: leave out --ranks under torchrun",
        ),
        (
            options.parallel == "shard" and world == 1,
            "--parallel shard shares a model among ranks, found one process: give --ranks N with N at least "
            "2, or start with torchrun",
        ),
    ):
        if is_wrong:
            raise InputError(message)
    if world == 1:
        return
    device = run.ranks.device(options.device)
    common = {
        f"--{name.replace('_', '-')}": value
        for name, value in options.by_name().items()
        if name not in OWN_OPTIONS
    }
    run.ranks.check_equal({**common, **versions()})
    run.settle(device=device)


def check_data_of_ranks(data: DataDigest | None, ranks: Ranks, resumed: Loaded | None = None) -> None:
    """Check that all ranks read the same training data, and those of the run that they resume.

    Args:
        data: what this rank reads; None if nothing tells its data from others.
        ranks: the ranks; all of them call it.
        resumed: the checkpoint; None for a new run.

    Raises:
        InputError: some rank reads other data.
    """
    digests = ranks.gather(data)
    whose = [f"rank {rank}" for rank in range(ranks.world)] if ranks.world > 1 else ["this run"]
    if resumed is not None:
        digests.insert(0, msgspec.convert(resumed.facts.get("data"), DataDigest | None))
        whose.insert(0, f"the checkpoint {resumed.path}")
    check_same_data(digests, whose)


def continue_after_restart(run: Run) -> None:
    """Resume in the same folder if the launcher has started the run again."""
    out = run.ranks.earlier_out
    if out is not None:
        has_checkpoint = run.ranks.once(lambda: bool(list_checkpoints(out / CHECKPOINTS)))
        run.settle(out=str(out), resume=has_checkpoint)


def claim_of_ranks(run: Run, choose: Callable[[], Path]) -> Path:
    """Lock the folder of the run on rank 0 until its end, and make it known to all ranks.

    Args:
        run: of this rank.
        choose: returns the folder; called on rank 0.

    Raises:
        InputError: it is not writable, another run holds it, or a rank does not see it.
    """

    def claim() -> str:
        out = choose()
        while True:
            run.held.enter_context(named_failures(out))
            try:
                run.held.enter_context(claim_folder(out))
                break
            except FolderTakenError:
                # A run that began in the same second has the same name for a new folder.
                other = choose()
                if other == out:
                    raise
                out = other
        clean_unfinished(out)
        # An earlier start left it: no rank of this one knows the folder yet.
        (out / VERDICT).unlink(missing_ok=True)
        return str(out)

    run.out = out = Path(run.ranks.once(claim))
    run.ranks.enter(out)
    if run.ranks.world > 1:
        _check_shared(out, run.ranks)
    run.entered(out)
    return out


def _check_shared(out: Path, ranks: Ranks) -> None:
    """Check that every rank sees a file that rank 0 makes in the folder of the run."""
    token = out / f".shared-{ranks.once(os.getpid)}"
    ranks.once(token.touch)
    deadline = time.monotonic() + SHARED_SECONDS
    while not token.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = ranks.gather((token.exists(), ranks.host))
    if ranks.rank == 0:
        with suppress(OSError):
            token.unlink()
    for rank, (is_seen, host) in enumerate(seen):
        if not is_seen:
            raise InputError(
                f"rank {rank} on {host} does not see the folder of the run {out.absolute()}: give an --out "
                "that all hosts share"
            )
