"""Start, pause, stop and report a run on one rank: control requests, checkpoints, journal events and files.

`train` builds a `Trainer`. `loop.training_loop` calls it before each batch and at the start and end of each epoch.
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from engine.config.precision import AmpChoice, describe_precision
from engine.data.image_files import enlarged_edge, fitting_size
from engine.data.plan import uses_threads
from engine.distributed.failures import FinalCheckpointError
from engine.distributed.watchdog import Phase
from engine.models.factory import weight_bytes
from engine.optim.lr_schedule import rising_steps, scaled_lr
from engine.optim.param_groups import count_parameters
from engine.runs.control import RequestCounters
from engine.runs.evaluations import EvaluationFile
from engine.runs.events import (
    EpochEvent,
    Event,
    PhaseChanged,
    RunContinued,
    RunPaused,
    RunResumed,
    RunStarted,
    WarningEvent,
)
from engine.runs.folder import MAX_EVALUATION_BYTES
from engine.runs.records import RankDevice, RankEpochTiming
from engine.runs.sinks import Sink, disk_problem
from engine.training.checkpoint_writer import CheckpointWriter
from engine.training.disk import disk_warnings
from engine.training.job import Outcome
from engine.training.losses import guessing_loss
from engine.training.memory import empty_cache, gather_peak_memory, reset_peak_memory
from engine.training.metrics import Evaluation, Metrics
from engine.training.profile import StepProfiler
from engine.training.rank_state import RankState
from engine.training.state_dict import restore_state
from engine.training.timing import EpochClock, data_wait_share, gather_timings
from engine.training.warmup import WarmupResult
from engine.utils.codec import FORMAT, UNSET, asdict, encode_indented, find_record, finite, write_record
from engine.utils.errors import Problem
from engine.utils.files import replace_file
from engine.utils.text import pluralize

MAX_LISTED_FILES = 10
# Poll interval of a paused run.
PAUSE_POLL_SECONDS = 0.1
# Steps between garbage collections, in all ranks at the same step: they would wait for one that collects alone. User
# models may create reference cycles that hold tensors.
GC_INTERVAL_STEPS = 500


class Trainer:
    """One rank, ready to train."""

    def __init__(self, state: RankState, rank_devices: list[RankDevice], warmup: WarmupResult) -> None:
        self.state, self.rank_devices, self.warmup = state, rank_devices, warmup
        self.job, self.config, self.source, self._rank = state.job, state.config, state.pipeline.source, state.rank_info
        self._checkpoint_writer = CheckpointWriter(state)
        channel = state.channel
        self._evaluation_sink = Sink(
            "evaluation.json",
            # Only rank 0 writes it. A method of this object would be a reference cycle.
            lambda problem: channel.send(WarningEvent.of(problem)),
            # The recorder reports a full disk.
            on_error=lambda error: disk_problem(error) is not None,
        )
        self._epoch_clock, self._first_step = EpochClock(state.restart_step_clock), 0
        self._train_seconds, self._timings = 0.0, list[RankEpochTiming]()
        self._profiler = StepProfiler(state, self._epoch_clock.stopped)
        self._is_training = False
        self.collect_garbage: Callable[[], object] = lambda: None

    def start_run(self, warnings: Sequence[Problem]) -> None:
        """Emit the first events of the run, and `warnings`; write the class names."""
        started = self.run_started()
        if self.job.resumed:
            self.emit(RunResumed(**asdict(started), from_step=self.state.position.step))
        else:
            self.emit(started)
        self.warn_skipped_files()
        self.emit_warnings(warnings)
        self._write_classes()

    def end_run(self, outcome: Outcome) -> None:
        """Write the checkpoint of a stopped run, and wait for all ranks."""
        self.state.agreement.wait_pending()
        self._profiler.interrupt("the run ended", is_last=True)
        if outcome == "stopped":
            self._checkpoint_writer.write_before_stop()
        self.finish_checkpoint()
        # srun may kill rank 0 while it is saving if another rank has exited.
        self.state.enter_phase(Phase.CHECKPOINT)
        dist.barrier(group=self.state.cpu_group)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, and report it. Not a collective."""
        self._checkpoint_writer.wait()

    def start_epoch(self) -> None:
        """Announce the epoch, collect garbage, and reset the clocks and the peak memory."""
        self.emit_phase("training")
        self._is_training = True
        self.collect_garbage()
        self._epoch_clock.start()
        self._first_step = self.state.position.step_in_epoch
        reset_peak_memory(self.state.device)
        self.state.timer.start_epoch()
        self.state.restart_step_clock()

    def record_train_time(self) -> None:
        """Record how long training took in this epoch. Call after reading its metrics, which waits for the device."""
        self._is_training = False
        self._profiler.interrupt("the epoch ended")
        self._train_seconds = self._epoch_clock.seconds()
        self._timings = gather_timings(self.state.timer, self._train_seconds, self.state.cpu_group)

    def emit_phase(self, phase: str) -> None:
        """Report what the run does now."""
        self.emit(PhaseChanged(phase=phase, step=self.state.position.step, epoch=self.state.position.epoch))

    def handle_requests(self) -> bool:
        """Handle control requests between two batches, on all ranks at the same batch; return whether to stop."""
        position = self.state.position
        if position.step_in_epoch and position.step % GC_INTERVAL_STEPS == 0:
            self.collect_garbage()
        self._checkpoint_writer.poll()
        agreed = self.state.agreement(self._poll_requests)
        if self._checkpoint_writer.is_due(agreed):
            with self._epoch_clock.stopped():
                self._checkpoint_writer.serve(agreed)
        if agreed.paused and not agreed.stop:
            self._profiler.interrupt("the run was paused")
            with self._epoch_clock.stopped():
                agreed = self._pause(agreed)
        if agreed.profile_steps != self._profiler.served_steps and self._is_training and not agreed.stop:
            self._profiler.advance(agreed.profile_steps)
        return agreed.stop

    def _poll_requests(self) -> RequestCounters:
        """Return the requests that this rank has received; rank 0 adds those of the checkpoint timer."""
        requests = self.state.channel.poll_requests()
        if self._rank.rank == 0 and self._checkpoint_writer.timer_fires():
            requests.timed_checkpoints += 1
        return requests

    def _pause(self, agreed: RequestCounters) -> RequestCounters:
        """Wait until all ranks agree to continue or to stop; requested checkpoints are still written."""
        state, step, epoch = self.state, self.state.position.step, self.state.position.epoch
        state.enter_phase(Phase.PAUSED)
        state.step_log.wait_pending()
        self.emit(RunPaused(step=step, epoch=epoch))
        while agreed.paused and not agreed.stop:
            # Again, because writing a checkpoint enters another phase.
            state.enter_phase(Phase.PAUSED)
            time.sleep(PAUSE_POLL_SECONDS)
            self._checkpoint_writer.poll()
            agreed = state.agreement(self._poll_requests)
            if self._checkpoint_writer.is_due(agreed):
                self._checkpoint_writer.serve(agreed, background=False)
        if not agreed.stop:
            self.emit(RunContinued(step=step, epoch=epoch))
        return agreed

    def log_epoch(self, train: Metrics, evaluation: Evaluation, ema_evaluation: Evaluation | None) -> None:
        """Emit the journal event of the epoch. A collective."""
        state, val = self.state, evaluation.scores()
        ema = ema_evaluation.scores() if ema_evaluation is not None else None
        if self.config.device.empty_cache:
            empty_cache(state.device)
        seconds = self._epoch_clock.seconds()
        if state.is_last_epoch(state.position.epoch):
            state.flush_step_log()
        train_size = state.image_format.at_epoch(state.position.epoch).size
        memory = gather_peak_memory(state.device, self.state.cpu_group)
        self.emit(
            EpochEvent(
                epoch=state.position.epoch,
                step=state.position.step,
                train_loss=finite(train.loss),
                train_accuracy=finite(train.accuracy),
                lr=finite(state.lr_at(state.sampler.steps_per_epoch)),
                seconds=round(seconds, 3),
                images_per_second=round(state.sampler.images_from_step(self._first_step) / self._train_seconds, 1),
                skipped_steps=state.step_log.total_skipped(),
                skipped_images=train.unread + evaluation.metrics.unread,
                train_size=train_size,
                flops=self.warmup.flops_by_size[train_size],
                rank_memory=memory,
                data_wait=data_wait_share(self._timings),
                rank_timings=self._timings,
                val_loss=val.loss,
                val_accuracy=val.accuracy,
                val_top5=val.top5,
                top_prediction=UNSET if evaluation.top_prediction is None else round(evaluation.top_prediction, 4),
                metrics=val.metrics,
                ema_val_loss=ema.loss if ema is not None else UNSET,
                ema_val_accuracy=ema.accuracy if ema is not None else UNSET,
                ema_val_top5=ema.top5 if ema is not None else UNSET,
                ema_metrics=ema.metrics if ema is not None else UNSET,
            )
        )

    def save_evaluation(self, evaluation: Evaluation) -> bool:
        """Write the evaluation file of the run; return whether the evaluation is the best so far."""
        epoch = self.state.position.epoch
        metrics = evaluation.metrics
        best = self._checkpoint_writer.update_best(epoch, metrics.accuracy, metrics.loss)
        if self._rank.rank == 0 and self.job.folder is not None:
            folder, last = self.job.folder, evaluation.to_stored(epoch)

            def write() -> None:
                with folder.opened() as opened:
                    previous = find_record(opened.evaluation, EvaluationFile, MAX_EVALUATION_BYTES)
                    best_so_far = last if best or previous is None else previous.best
                    content = EvaluationFile(classes=tuple(self.source.classes), last=last, best=best_so_far)
                    write_record(opened.evaluation, content)

            self._evaluation_sink.attempt(write, force=best)
        return best

    def save_epoch_checkpoint(self, epoch: int, *, best: bool) -> None:
        """Write a checkpoint after the best and the last epoch, and every `checkpoint.every_epochs`. Raises
        FinalCheckpointError."""
        is_last = self.state.is_last_epoch(epoch)
        if best or is_last or epoch % self.config.checkpoint.every_epochs == 0:
            problem = self._checkpoint_writer.write(best=best, background=not is_last)
            if is_last and problem is not None:
                raise FinalCheckpointError(
                    f"training is complete, but its last checkpoint could not be written ({problem}); fix the cause",
                )

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Restore everything but model and position from a checkpoint; warn of what cannot be restored."""
        self._checkpoint_writer.restore(checkpoint)
        for warning in restore_state(self.state, checkpoint, self._rank.rank):
            self.emit(WarningEvent.of(warning))

    def emit(self, event: Event) -> None:
        """Emit an event once for all ranks."""
        if self._rank.rank == 0:
            self.state.channel.send(event)

    def run_started(self) -> RunStarted:
        """Return the event that describes the run."""
        state = self.state
        name = self.job.folder.name if self.job.folder else (self.config.run.name or "")
        edge, guessing = enlarged_edge(self.config, self.source), guessing_loss(self.config, state.num_classes)
        return RunStarted(
            format=FORMAT,
            name=name,
            host=socket.gethostname(),
            world_size=self._rank.world_size,
            devices=[rank_device.device for rank_device in self.rank_devices],
            ranks=self.rank_devices,
            backend=dist.get_backend(),
            start_method=self.job.start_method or "",
            epochs=self.config.run.epochs,
            global_batch=state.sampler.global_batch,
            steps_per_epoch=state.sampler.steps_per_epoch,
            train_images=state.sampler.train_images,
            val_images=state.sampler.val_images,
            test_images=self.source.num_images("test"),
            classes=len(self.source.classes),
            parameters=count_parameters(state.model),
            precision=self._describe_precision(),
            trainable_parameters=sum(p.numel() for p in state.model.parameters() if p.requires_grad),
            workers=state.pipeline.plan.workers,
            worker_type="threads" if uses_threads(self.config) else "processes",
            image_format=state.image_format.describe(),
            pipeline=state.pipeline.plan.pipeline,
            pipeline_reason=state.pipeline.plan.reason,
            pipeline_auto=self.config.data.pipeline == "auto",
            batch_size=state.sampler.batch_size,
            cores=self.job.plan.threads_per_rank,
            small_step_seconds=self.warmup.step_seconds,
            small_step_images=self.warmup.batch_size,
            train_size=state.image_format.size,
            guessing_loss=guessing if guessing is not None else UNSET,
            peak_lr=finite(scaled_lr(self.config.optim, state.sampler.num_devices)) or UNSET,
            warmup_steps=rising_steps(self.config.schedule, state.sampler.steps_per_epoch, self.config.run.epochs),
            enlarged_edge=edge,
            fitting_size=fitting_size(self.config, edge),
            compiled=self.config.model.compile,
            input=", ".join(filter(None, (state.image_format.describe(), self.job.input_source))),
            flops=self.warmup.flops_by_size[state.image_format.size],
            peak_tflops=self.warmup.peak_tflops,
            versions={"gputrain": version("gputrain"), "torch": torch.__version__, "python": platform.python_version()},
        )

    def _describe_precision(self) -> str:
        return describe_precision(
            AmpChoice(self.config.precision.amp, self.job.amp_reason),
            tf32=self.state.uses_tf32,
            channels_last=self.state.memory_format is torch.channels_last,
            numa=self.job.plan.describe_numa(),
        )

    def warn_skipped_files(self) -> None:
        """Warn of the files of the dataset that are no readable images, and of the folders that are not used."""
        skipped = self.source.skipped
        if not skipped or self._rank.rank != 0:
            return
        more = ""
        if len(skipped) > MAX_LISTED_FILES:
            more = f", and {len(skipped) - MAX_LISTED_FILES} more"
            if self.job.folder is not None:
                names = "\n".join(skipped) + "\n"
                with suppress(OSError), self.job.folder.opened() as opened:
                    content = names.encode(errors="backslashreplace")
                    replace_file(opened.skipped_files, lambda file: file.write(content))
                    more += f", all listed in {opened.skipped_files.name}"
        self.emit(
            WarningEvent(
                message=f"{pluralize(len(skipped), 'item')} skipped: {', '.join(skipped[:MAX_LISTED_FILES])}{more}",
                code="bad-image",
            )
        )

    def emit_warnings(self, warnings: Sequence[Problem]) -> None:
        """Emit the notes of the setup, `warnings`, and those about disk space."""
        disk_problems: list[Problem] = []
        if self._rank.rank == 0 and self.job.folder is not None:
            disk_problems = disk_warnings(self.config, self.job.folder.checkpoints, weight_bytes(self.state.model))
        for problem in (*self.state.network.notes, *warnings, *disk_problems):
            self.emit(WarningEvent.of(problem))

    def _write_classes(self) -> None:
        if self._rank.rank == 0 and self.job.folder is not None:
            names = {str(index): name for index, name in enumerate(self.source.classes)}
            with suppress(OSError), self.job.folder.opened() as opened:
                replace_file(opened.class_indices, lambda file: file.write(encode_indented(names) + b"\n"))
