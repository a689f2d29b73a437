"""When checkpoints are due and what they hold: copy the state of all ranks, and write it in a background thread.

`control` calls it between two steps, `trainer` after an epoch. `checkpoint` defines the format and writes the file,
`resume` restores the state. To write 1 GB (ViT-B with AdamW) takes 12 s on a disk of 100 MB/s, and the smallest file
25 ms, 6% of a short epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.base.codec import replace
from engine.config.schema import as_stored
from engine.runs.control import RequestCounters
from engine.runs.events import CheckpointSaved, PhaseChanged, WarningEvent
from engine.runs.folder import RunFolder
from engine.train.data.sampler import PARTS
from engine.train.distributed.collectives import gather_bytes
from engine.train.distributed.watchdog import Phase
from engine.train.loop.checkpoint import save_checkpoint
from engine.train.loop.data import TrainingData
from engine.train.loop.device import rng_state
from engine.train.loop.job import Job
from engine.train.loop.log import TrainingLog
from engine.train.loop.model import Model
from engine.train.models.precision import full_precision_state_dict

# Minimum time between two warnings that a checkpoint could not be written.
SAVE_WARNING_INTERVAL_SECONDS = 600.0
# Time between two heartbeats of a rank that waits for the thread.
WAIT_HEARTBEAT_SECONDS = 1.0
# Identifies the memory of a tensor: tied weights are two tensors in one memory.
Memory = tuple[int, torch.device, torch.dtype, torch.Size, tuple[int, ...]]


class CheckpointWriter:
    """Writes the checkpoints of a run on rank 0 with the state of all ranks; a dry run has no folder and writes none.

    All ranks call it at the same step with the same requests, so that all of them take part in the same checkpoint.
    During training, `write` only copies the state to host memory. A thread flushes the journal, then hashes, writes,
    syncs and links the file, one at a time: the next checkpoint waits for it, except that the timer fires only when the
    thread is idle. The thread uses no live tensors, and sends no event: the main thread sends that of a written file
    when it calls `poll`, between two steps.
    """

    def __init__(
        self, job: Job, data: TrainingData, model: Model, log: TrainingLog, cpu_group: dist.ProcessGroup
    ) -> None:
        self._folder, self._data, self._model, self._log = job.folder, data, model, log
        self._channel, self._cpu_group, self._position = log.channel, cpu_group, data.position
        self._writes = self._folder is not None and data.sampler.rank == 0
        # Before training, because a million files take a quarter of a second.
        self._fingerprints = {part: asdict(data.source.fingerprint(part)) for part in PARTS} if self._writes else {}
        self._config = job.config.checkpoint
        self._served_requests, self._served_timer = 0, 0
        self.last_saved_step, self._last_save_time = 0, time.monotonic()
        self._last_save_warning: float | None = None
        # Starts its thread at the first checkpoint, after the DataLoader workers are forked.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: tuple[CheckpointSaved, Future[Path]] | None = None

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
        every, step = self._config.every_steps, self._position.step
        due = agreed.timed_checkpoints > self._served_timer or (every > 0 and step % every == 0)
        return due and step > self.last_saved_step

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
        self._log.enter_phase(Phase.CHECKPOINT)
        self.wait()
        self._last_save_warning = None
        self._write_mid_epoch(requested=False, background=False)

    def _write_mid_epoch(self, *, requested: bool, background: bool) -> None:
        """Write between two steps, when no collective but those of the step log and of `agreement` is in progress."""
        self._log.check()
        self._model.broadcast_buffers()
        self.write(requested=requested, background=background)

    def write(self, *, best: bool = False, requested: bool = False, background: bool = False) -> str | None:
        """Write a checkpoint of all ranks; return why it failed on rank 0, else None. A collective.

        With `background`, return None as soon as the state is copied; `poll` and `wait` report what comes of it.
        """
        position = self._position
        self._log.enter_phase(Phase.CHECKPOINT)
        if self._writes:
            self._channel.send(PhaseChanged(phase="saving", step=position.step, epoch=position.epoch))
        self.wait()
        self.last_saved_step, self._last_save_time = position.step, time.monotonic()
        content = self._gather_state(copy=background)
        if content is None or self._folder is None:
            return None
        saved = CheckpointSaved(path="", step=position.step, epoch=position.epoch, best=best, requested=requested)
        self._channel.set_saving(True)
        # The sizes of what the thread has written since the last heartbeat.
        self._written_sizes: list[int] = []
        self._in_flight = saved, self._thread.submit(self._save, content, self._folder, saved)
        return None if background else self.wait()

    def _gather_state(self, *, copy: bool) -> dict[str, Any] | None:
        """Return the content of a checkpoint in host memory on rank 0, None on other ranks. A collective.

        With `copy`, it shares no memory with what the next step changes.
        """
        data, model, log, position = self._data, self._model, self._log, self._position
        local = {
            "rng": rng_state(model.device),
            "loss_sum": log.train_metrics.loss_sum.cpu(),
            "counts": log.train_metrics.counts.cpu(),
            "unreported": log.unreported(),
        }
        buffer = BytesIO()
        torch.save(local, buffer)
        rank_files = gather_bytes(buffer.getvalue(), self._cpu_group)
        if not self._writes:
            return None
        if model.ema is not None:
            model.ema.copy_buffers(model.network)
        live = {
            "model": full_precision_state_dict(model.network, model.master),
            "ema": model.ema.network.state_dict() if model.ema is not None else None,
            "optimizer": model.optimizer.state_dict(),
        }
        return {
            "config": as_stored(model.config),
            "classes": list(data.source.classes),
            "image_format": asdict(data.image_format),
            "tf32": model.uses_tf32,
            **in_host_memory(live, copy=copy),
            "scaler": model.scaler.state_dict(),
            "plateau": model.plateau.state_dict(),
            "early_stop": log.early_stop.state_dict(),
            "epoch": position.epoch,
            "step_in_epoch": position.step_in_epoch,
            "step": position.step,
            "skipped": log.skipped.total,
            "consecutive_skipped": log.skipped.consecutive,
            "global_batch": data.sampler.global_batch,
            "images": [data.sampler.train_images, data.sampler.val_images],
            "ranks": [torch.load(BytesIO(file), weights_only=True) for file in rank_files],
            "best_epoch": log.best.epoch,
            "best_accuracy": log.best.value,
            "best_loss": log.best.loss,
            "fingerprints": self._fingerprints,
            "task": model.task.state,
        }

    def _save(self, content: dict[str, Any], folder: RunFolder, saved: CheckpointSaved) -> Path:
        """Write a checkpoint, and return its path in the run folder; runs in the thread. Raises OSError."""
        try:
            # Otherwise a crash could leave a checkpoint whose earlier events are missing from the journal.
            self._channel.flush()
            with folder.opened() as opened:
                keep, on_write = self._config.keep, self._written_sizes.append
                path = save_checkpoint(content, opened.checkpoints, best=saved.best, keep=keep, on_write=on_write)
                return path.relative_to(opened.path)
        finally:
            self._channel.set_saving(False)

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
        saved, future = self._in_flight
        while not wait_for_futures([future], WAIT_HEARTBEAT_SECONDS).done:
            if self._written_sizes:
                self._written_sizes.clear()
                self._log.enter_phase(Phase.CHECKPOINT)
        self._in_flight = None
        try:
            path = future.result()
        except OSError as error:
            reason = error.strerror or str(error)
            self._warn_unsaved(saved, reason)
            return reason
        self._last_save_warning = None
        self._channel.send(replace(saved, path=str(path)))
        return None

    def _warn_unsaved(self, saved: CheckpointSaved, reason: str) -> None:
        """Warn at most once per interval, but always if someone has requested the checkpoint."""
        now, last = time.monotonic(), self._last_save_warning
        if saved.requested or last is None or now - last > SAVE_WARNING_INTERVAL_SECONDS:
            self._last_save_warning = now
            self._channel.send(
                WarningEvent(
                    message=f"the checkpoint of step {saved.step} could not be written: {reason}", code="not-writable"
                )
            )


def in_host_memory(live: Mapping[str, Any], *, copy: bool = False) -> dict[str, Any]:
    """Return the state dicts of model, EMA and optimizer on the CPU, so that `torch.load` reads them on any host, with
    contiguous weights, so that files do not depend on the memory format.

    Without `copy`, only tensors of a GPU, and weights that are not contiguous, are copied. Tensors that are the same
    memory, such as tied weights, stay so.
    """
    copies: dict[Memory, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            copies[key] = tensor.to("cpu", copy=copy)
        return copies[key]

    on_cpu = map_tensors(dict(live), convert)
    return {
        key: value if key == "optimizer" else map_tensors(value, Tensor.contiguous) for key, value in on_cpu.items()
    }


def map_tensors(value: Any, convert: Callable[[Tensor], Any]) -> Any:
    """Return nested containers as new dicts, lists and tuples, with each tensor converted."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, convert) for key, item in value.items()}
    if isinstance(value, list):
        return [map_tensors(item, convert) for item in value]
    return tuple(map_tensors(item, convert) for item in value) if type(value) is tuple else value
