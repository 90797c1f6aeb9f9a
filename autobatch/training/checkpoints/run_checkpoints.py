"""The checkpoints that a run writes: when they are due, and what happens if one cannot be written."""

from __future__ import annotations

from pathlib import Path

from autobatch.core.errors import CheckpointError, DoesNotFitError
from autobatch.core.progress import Progress
from autobatch.device.oom import first_line, is_oom
from autobatch.training.checkpoints.checkpoint import save_checkpoint
from autobatch.training.checkpoints.load import Loaded
from autobatch.training.loop import Loop
from autobatch.training.loop_state import capture_loop, check_checkpoint_state
from autobatch.training.out_of_memory import available_host_memory
from autobatch.training.run_folder import CHECKPOINTS, OOM_FILE, RunFiles


class RunCheckpoints:
    """The checkpoints of a run. All ranks make the same calls, and rank 0 writes.

    Args:
        loop: the loop.
        files: the folder and the intervals.
        resumed: the checkpoint that the run continues from; None for a new run.
    """

    def __init__(self, loop: Loop, files: RunFiles, resumed: Loaded | None) -> None:
        self._loop = loop
        self._files = files
        self._resumed_from = None if resumed is None else resumed.path
        self.newest = self._resumed_from
        """The last checkpoint; None if there is none."""
        self.failed_steps: list[int] = (
            [] if resumed is None else [*resumed.facts.get("failed_checkpoints", [])]
        )
        """Steps after which no checkpoint could be written."""
        self._saved_at = loop.clock()

    def is_due(self, step: int) -> bool:
        """Check whether a checkpoint of a step is due; all ranks call it."""
        every, minutes = (
            self._files.options.train.checkpoint_every,
            self._files.options.train.checkpoint_minutes,
        )
        if every and step % every == 0:
            return True
        if minutes is None:
            return False
        return self._loop.engine.ranks.agree(self._loop.clock() - self._saved_at > 60 * minutes)

    def save_periodic(self, progress: Progress) -> None:
        """Write a checkpoint that is due; if it fails and the run may continue, wait for the next one."""
        try:
            self._save()
            progress.saved(self._loop.batches_seen)
        except (CheckpointError, DoesNotFitError) as error:
            if self._files.options.train.on_failed_save == "stop":
                raise
            self.failed_steps.append(self._loop.batches_seen)
            self._saved_at = self._loop.clock()
            progress.note(f"{error}. The run continues without it (--on-failed-save continue)")

    def save_if_needed(self) -> None:
        """Write a checkpoint unless the last one is of this step."""
        if self.newest is None or self._loop.batches_seen != _step_of(self.newest):
            self._save()

    def _save(self) -> None:
        """Write a checkpoint. Rank 0 writes it, and no rank trains on before it is published.

        Raises:
            CheckpointError: it could not be written.
            DoesNotFitError: memory ran out. The state of the run, and earlier checkpoints, are intact.
        """
        try:
            with self._loop.times.besides("checkpoint"):
                self._write_checkpoint()
        except Exception as error:
            if not is_oom(error):
                raise
            reason = first_line(error).rstrip(".")
        else:
            return
        # Outside of the except block, so that nothing holds the copies of the state.
        self._loop.device.release()
        raise DoesNotFitError(
            f"out of memory while the checkpoint of step {self._loop.batches_seen} was written, with "
            f"{available_host_memory()} of host memory available: {reason}. Earlier checkpoints are intact. "
            "Free host memory and resume, or let the run continue without it (--on-failed-save continue)"
        )

    def _write_checkpoint(self) -> None:
        loop, files, ranks = self._loop, self._files, self._loop.engine.ranks
        loop.engine.share(loop.train_state.model.buffers())
        state = capture_loop(loop)
        check_checkpoint_state(state)
        self.newest = save_checkpoint(
            files.out / CHECKPOINTS,
            step=loop.batches_seen,
            state=state,
            facts={
                **files.facts,
                "failed_checkpoints": self.failed_steps,
                "times": loop.times.state_dict(),
            },
            keep_last=files.options.train.keep_last,
            protected=self._resumed_from,
            ranks=ranks,
        )
        # From now on the checkpoint has the smaller micro-batch. No rank continues before, because it may run
        # out of memory at once and write this file.
        ranks.once(lambda: (files.out / OOM_FILE).unlink(missing_ok=True))
        self._saved_at = loop.clock()


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
