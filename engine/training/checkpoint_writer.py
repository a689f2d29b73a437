"""Decide when checkpoints are due, and write them.

`trainer` calls it between two steps and after an epoch. `checkpoint` defines the file format, `state_dict` the content.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from engine.data.sampler import PARTS
from engine.data.sources.base import ImageSource
from engine.distributed.watchdog import Phase
from engine.runs.control import RequestCounters
from engine.runs.events import CheckpointSaved, PhaseChanged, WarningEvent
from engine.runs.folder import RunFolder
from engine.training.checkpoint import save_checkpoint
from engine.training.rank_state import RankState
from engine.training.state_dict import gather_state

# Minimum time between two warnings that a checkpoint could not be written.
SAVE_WARNING_INTERVAL_SECONDS = 600.0


class CheckpointWriter:
    """Writes the checkpoints of a run on rank 0 with the state of all ranks; a dry run has no folder and writes none.

    All ranks call it at the same step with the same requests, so that all of them take part in the same checkpoint.
    """

    def __init__(
        self,
        state: RankState,
        source: ImageSource,
        folder: RunFolder | None,
        cpu_group: dist.ProcessGroup,
    ) -> None:
        self._state, self._classes, self._folder, self._cpu_group = state, source.classes, folder, cpu_group
        self._writes = folder is not None and dist.get_rank() == 0
        # Before training, because a million files take a quarter of a second.
        self._fingerprints = {part: asdict(source.fingerprint(part)) for part in PARTS} if self._writes else {}
        self._config = state.config.checkpoint
        self._best_epoch, self._best_accuracy = 0, -1.0
        self._served_requests, self._served_timer = 0, 0
        self._last_saved_step, self._last_save_time = 0, time.monotonic()
        self._last_save_warning: float | None = None

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Restore the best accuracy and the step of the checkpoint that the run resumes from."""
        self._best_epoch, self._best_accuracy = checkpoint["best_epoch"], checkpoint["best_accuracy"]
        self._last_saved_step = checkpoint["step"]

    def timer_fires(self) -> bool:
        """Return whether `checkpoint.every_minutes` have passed since the last checkpoint or the last True."""
        minutes = self._config.every_minutes
        fires = 0 < minutes * 60 < time.monotonic() - self._last_save_time
        if fires:
            self._last_save_time = time.monotonic()
        return fires

    def is_due(self, agreed: RequestCounters) -> bool:
        """Return whether to write a checkpoint at this step. Not before a stop, which writes its own."""
        if agreed.stop:
            return False
        if self._is_requested(agreed):
            return True
        every, step = self._config.every_steps, self._state.position.step
        due = agreed.timed_checkpoints > self._served_timer or (every > 0 and step % every == 0)
        return due and step > self._last_saved_step

    def _is_requested(self, agreed: RequestCounters) -> bool:
        return agreed.checkpoints > self._served_requests

    def serve(self, agreed: RequestCounters) -> None:
        """Write the checkpoint for which `is_due` returned True, in the middle of an epoch."""
        requested = self._is_requested(agreed)
        self._served_requests, self._served_timer = agreed.checkpoints, agreed.timed_checkpoints
        self._write_mid_epoch(requested=requested)

    def write_before_stop(self) -> None:
        """Write the checkpoint that a stopped run resumes from; a failure is always reported."""
        self._last_save_warning = None
        self._write_mid_epoch(requested=False)

    def _write_mid_epoch(self, *, requested: bool) -> None:
        """Write between two steps, when no collective but those of the step log and of `agreement` is in progress."""
        self._state.check_step_log()
        self._state.broadcast_buffers()
        self.write(requested=requested)

    def update_best(self, epoch: int, accuracy: float) -> bool:
        """Record the validation accuracy of an epoch; return whether it is the best so far."""
        best = accuracy > self._best_accuracy
        if best:
            self._best_epoch, self._best_accuracy = epoch, accuracy
        return best

    def write(self, *, best: bool = False, requested: bool = False) -> str | None:
        """Write a checkpoint of all ranks; return why it failed on rank 0, else None. A collective."""
        state, position = self._state, self._state.position
        state.enter_phase(Phase.CHECKPOINT)
        if self._writes:
            state.channel.send(PhaseChanged(phase="saving", step=position.step, epoch=position.epoch))
        self._last_saved_step, self._last_save_time = position.step, time.monotonic()
        content = gather_state(state, self._classes, self._cpu_group)
        if content is None or self._folder is None:
            return None
        content |= {"best_epoch": self._best_epoch, "best_accuracy": self._best_accuracy}
        content |= {"data": self._fingerprints}
        # Otherwise a crash could leave a checkpoint whose earlier events are missing from the journal.
        state.channel.flush()
        try:
            path = save_checkpoint(content, self._folder.checkpoints, best=best, keep=self._config.keep)
        except OSError as error:
            reason = error.strerror or str(error)
            self._warn_unsaved(reason, always=requested)
            return reason
        self._last_save_warning = None
        relative = str(path.relative_to(self._folder.root))
        state.channel.send(
            CheckpointSaved(path=relative, step=position.step, epoch=position.epoch, best=best, asked=requested)
        )
        return None

    def _warn_unsaved(self, reason: str, *, always: bool) -> None:
        """Warn at most once per interval; `always` if someone has requested the checkpoint."""
        now, last = time.monotonic(), self._last_save_warning
        if always or last is None or now - last > SAVE_WARNING_INTERVAL_SECONDS:
            self._last_save_warning = now
            step = self._state.position.step
            self._state.channel.send(
                WarningEvent(message=f"the checkpoint of step {step} could not be written: {reason}")
            )
