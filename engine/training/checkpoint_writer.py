"""Decide when checkpoints are due, copy the training state, and write it in a background thread.

`trainer` calls it between two steps and after an epoch. `checkpoint` defines the file format, `state_dict` the content.
To write 1 GB (ViT-B with AdamW) takes 12 s on a disk of 100 MB/s, and the smallest file 25 ms, 6% of a short epoch.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.data.sampler import PARTS
from engine.distributed.watchdog import Phase
from engine.runs.control import RequestCounters
from engine.runs.events import CheckpointSaved, PhaseChanged, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.metrics import METRICS
from engine.training.checkpoint import SaveProgress, save_checkpoint
from engine.training.rank_state import RankState
from engine.training.state_dict import LIVE_KEYS, gather_state, in_host_memory, map_tensors
from engine.utils.codec import finite
from engine.utils.host import free_memory

# Minimum time between two warnings that a checkpoint could not be written.
SAVE_WARNING_INTERVAL_SECONDS = 600.0
# Time between two heartbeats of a rank that waits for the thread.
WAIT_HEARTBEAT_SECONDS = 1.0
# Host memory that stays free for loader processes and other programs.
RESERVED_BYTES = 1 << 29


@dataclass(frozen=True)
class Save:
    """One checkpoint: its position, and what caused it."""

    step: int
    epoch: int
    best: bool
    requested: bool


class CheckpointWriter:
    """Writes the checkpoints of a run on rank 0 with the state of all ranks; a dry run has no folder and writes none.

    All ranks call it at the same step with the same requests, so that all of them take part in the same checkpoint.
    During training, `write` only copies the state to host memory. A thread flushes the journal, then hashes, writes,
    syncs and links the file, one at a time: the next checkpoint waits for it, except that the timer fires only when the
    thread is idle. The thread uses no live tensors, and sends no event: the main thread sends that of a written file
    when it calls `poll`, between two steps.
    """

    def __init__(self, state: RankState) -> None:
        self._state, self._folder, source = state, state.job.folder, state.pipeline.source
        self._writes = self._folder is not None and state.rank_info.rank == 0
        # Before training, because a million files take a quarter of a second.
        self._fingerprints = {part: asdict(source.fingerprint(part)) for part in PARTS} if self._writes else {}
        self._config = state.config.checkpoint
        self._best_epoch, self._best_accuracy = 0, -1.0
        self._best_loss: float | None = None
        self._served_requests, self._served_timer = 0, 0
        self._last_saved_step, self._last_save_time = 0, time.monotonic()
        self._last_save_warning: float | None = None
        # Starts its thread at the first checkpoint, after the DataLoader workers are forked.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: tuple[Save, Future[Path], SaveProgress] | None = None

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Restore the best epoch and the step of the checkpoint that the run resumes from."""
        self._best_epoch, self._best_accuracy = checkpoint["best_epoch"], checkpoint["best_accuracy"]
        # Older checkpoints lack it.
        self._best_loss = checkpoint.get("best_loss")
        self._last_saved_step = checkpoint["step"]

    def timer_fires(self) -> bool:
        """Return whether `checkpoint.every_minutes` have passed since the last checkpoint or the last True.

        Not while a checkpoint is being written: only rank 0 knows, and training would wait for the disk.
        """
        minutes = self._config.every_minutes
        fires = self._in_flight is None and 0 < minutes * 60 < time.monotonic() - self._last_save_time
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

    def serve(self, agreed: RequestCounters, *, background: bool = True) -> None:
        """Write the checkpoint for which `is_due` returned True, in the middle of an epoch."""
        requested = self._is_requested(agreed)
        self._served_requests, self._served_timer = agreed.checkpoints, agreed.timed_checkpoints
        self._write_mid_epoch(requested=requested, background=background)

    def write_before_stop(self) -> None:
        """Write the checkpoint that a stopped run resumes from; a failure is always reported."""
        # First, because a failure of the one in flight is reported, too. The supervisor exempts this phase from the
        # timeout of a stop.
        self._state.enter_phase(Phase.CHECKPOINT)
        self.wait()
        self._last_save_warning = None
        self._write_mid_epoch(requested=False, background=False)

    def _write_mid_epoch(self, *, requested: bool, background: bool) -> None:
        """Write between two steps, when no collective but those of the step log and of `agreement` is in progress."""
        self._state.check_step_log()
        self._state.broadcast_buffers()
        self.write(requested=requested, background=background)

    def update_best(self, epoch: int, accuracy: float, loss: float) -> bool:
        """Record the validation of an epoch; return whether it is the best so far."""
        rank, known_loss = METRICS["best_val_accuracy"].rank, finite(loss)
        before = rank(self._best_accuracy, self._best_loss, self._best_epoch)
        best = rank(accuracy, known_loss, epoch) > before
        if best:
            self._best_epoch, self._best_accuracy, self._best_loss = epoch, accuracy, known_loss
        return best

    def write(self, *, best: bool = False, requested: bool = False, background: bool = False) -> str | None:
        """Write a checkpoint of all ranks; return why it failed on rank 0, else None. A collective.

        With `background`, return None as soon as the state is copied; `poll` and `wait` report what comes of it.
        """
        state, position = self._state, self._state.position
        state.enter_phase(Phase.CHECKPOINT)
        if self._writes:
            state.channel.send(PhaseChanged(phase="saving", step=position.step, epoch=position.epoch))
        self.wait()
        self._last_saved_step, self._last_save_time = position.step, time.monotonic()
        content = gather_state(state)
        if content is None or self._folder is None:
            return None
        content |= {"best_epoch": self._best_epoch, "best_accuracy": self._best_accuracy, "best_loss": self._best_loss}
        content |= {"fingerprints": self._fingerprints}
        background = background and _has_memory_for(content)
        content |= in_host_memory({key: content[key] for key in LIVE_KEYS}, copy=background)
        save, progress = Save(position.step, position.epoch, best, requested), SaveProgress()
        state.channel.set_saving(True)
        future = self._thread.submit(self._save, content, self._folder, save, progress)
        self._in_flight = save, future, progress
        return None if background else self.wait()

    def _save(self, content: dict[str, Any], folder: RunFolder, save: Save, progress: SaveProgress) -> Path:
        """Write a checkpoint, and return its path in the run folder; runs in the thread. Raises OSError."""
        try:
            # Otherwise a crash could leave a checkpoint whose earlier events are missing from the journal.
            self._state.channel.flush()
            with folder.opened() as opened:
                path = save_checkpoint(
                    content, opened.checkpoints, best=save.best, keep=self._config.keep, progress=progress
                )
                return path.relative_to(opened.path)
        finally:
            self._state.channel.set_saving(False)

    def poll(self) -> None:
        """Report the checkpoint in flight if it has been written. Not a collective."""
        if self._in_flight is not None and self._in_flight[1].done():
            self.wait()

    def wait(self) -> str | None:
        """Wait for the checkpoint in flight, and report it; return why it failed, None if it did not or there is none.

        The heartbeat goes on as long as bytes are written: the watchdog detects a disk that hangs, not one that is
        slow. Not a collective.
        """
        if self._in_flight is None:
            return None
        save, future, progress = self._in_flight
        seen_bytes = 0
        while not wait_for_futures([future], WAIT_HEARTBEAT_SECONDS).done:
            if progress.written_bytes != seen_bytes:
                seen_bytes = progress.written_bytes
                self._state.enter_phase(Phase.CHECKPOINT)
        self._in_flight = None
        try:
            path = future.result()
        except OSError as error:
            reason = error.strerror or str(error)
            self._warn_unsaved(save, reason)
            return reason
        self._last_save_warning = None
        self._state.channel.send(
            CheckpointSaved(path=str(path), step=save.step, epoch=save.epoch, best=save.best, requested=save.requested)
        )
        return None

    def _warn_unsaved(self, save: Save, reason: str) -> None:
        """Warn at most once per interval, but always if someone has requested the checkpoint."""
        now, last = time.monotonic(), self._last_save_warning
        if save.requested or last is None or now - last > SAVE_WARNING_INTERVAL_SECONDS:
            self._last_save_warning = now
            self._state.channel.send(
                WarningEvent(
                    message=f"the checkpoint of step {save.step} could not be written: {reason}", code="not-writable"
                )
            )


def _has_memory_for(content: dict[str, Any]) -> bool:
    """Whether the host has the memory for a copy of the training state."""
    sizes: list[int] = []
    map_tensors({key: content[key] for key in LIVE_KEYS}, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes) + RESERVED_BYTES < free_memory()[0]
