"""One rank, ready to train: its four parts, and what it reports of the run: journal events and files.

`train` calls `build_trainer`. `loop` runs the epochs with the `Trainer`.
"""

from __future__ import annotations

import gc
import math
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from engine.base.codec import FORMAT, UNSET, asdict, encode_indented, find_record, finite, write_record
from engine.base.errors import Problem
from engine.base.files import replace_file
from engine.base.text import pluralize
from engine.config.monitor import monitored_name
from engine.config.precision import AmpChoice, describe_precision
from engine.config.tasks import task_facts
from engine.runs.evaluations import EvaluationFile
from engine.runs.events import EpochEvent, PhaseChanged, RunResumed, RunStarted, WarningEvent
from engine.runs.folder import MAX_EVALUATION_BYTES
from engine.runs.metrics import Better
from engine.runs.records import RankDevice, RankEpochTiming
from engine.runs.sinks import Sink, disk_problem
from engine.train.data.device import InputPipeline
from engine.train.data.plan import uses_threads
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.distributed.channel import Channel
from engine.train.distributed.failures import FinalCheckpointError
from engine.train.distributed.parallel import wrap_model
from engine.train.distributed.process_group import join_process_group
from engine.train.distributed.rank_env import RankInfo
from engine.train.loop.clock import data_wait_share, gather_timings
from engine.train.loop.control import Control
from engine.train.loop.data import TrainingData, resume_position
from engine.train.loop.device import init_device, seed_everything
from engine.train.loop.disk import disk_warnings
from engine.train.loop.job import Job
from engine.train.loop.log import TrainingLog
from engine.train.loop.metrics import Evaluation, Metrics
from engine.train.loop.model import Model, lr_of_step
from engine.train.loop.own_metrics import OwnMetrics
from engine.train.loop.resume import restore_state
from engine.train.loop.tasks.table import build_task
from engine.train.loop.warmup import Warmup
from engine.train.models.factory import weight_bytes
from engine.train.optim.param_groups import count_parameters

MAX_LISTED_FILES = 10


class Trainer:
    """One rank of a run.

    `data` has its batches and its position in them, `model` all that is trained, `log` what is measured and emitted,
    and `control` serves requests and writes checkpoints. `cpu_group` is a Gloo process group for host memory.
    """

    def __init__(
        self,
        job: Job,
        data: TrainingData,
        model: Model,
        log: TrainingLog,
        own_metrics: OwnMetrics,
        cpu_group: dist.ProcessGroup,
        rank_devices: list[RankDevice],
    ) -> None:
        self.job, self.config, self.device = job, job.config, model.device
        self.data, self.model, self.log, self.own_metrics, self.cpu_group = data, model, log, own_metrics, cpu_group
        self.control = Control(job, data, model, log, cpu_group)
        self.rank_devices = rank_devices
        self.flops_by_size, self.peak_tflops = Warmup(data, model, log, cpu_group).run()
        self._evaluation_sink = Sink(
            "evaluation.json",
            # Only rank 0 writes it.
            log.warn,
            # The recorder reports a full disk.
            on_error=lambda error: disk_problem(error) is not None,
        )
        self.is_rank_0, self._first_step, self._train_seconds = data.sampler.rank == 0, 0, 0.0
        self._timings = list[RankEpochTiming]()

    def start_run(self, warnings: Sequence[Problem]) -> None:
        """Emit the first events of the run, and `warnings`; write the class names."""
        started = self.run_started()
        if self.job.resumed:
            self.log.emit(RunResumed(**asdict(started), from_step=self.data.position.step))
        else:
            self.log.emit(started)
        self.warn_skipped_files()
        self.emit_warnings(warnings)
        if self.is_rank_0 and self.job.folder is not None:
            names = {str(index): name for index, name in enumerate(self.data.source.classes)}
            with suppress(OSError), self.job.folder.opened() as opened:
                replace_file(opened.class_indices, lambda file: file.write(encode_indented(names) + b"\n"))

    def begin_epoch(self, epoch: int) -> None:
        """Move to the first step of an epoch, whose metrics are empty."""
        self.data.start_epoch(epoch)
        self.log.start_epoch()

    def start_epoch(self) -> None:
        """Announce the epoch, collect garbage, and reset the clock."""
        self.emit_phase("training")
        self.control.is_training = True
        gc.collect()
        self._first_step = self.data.position.step_in_epoch
        self.log.clock.start_epoch()

    def end_train_epoch(self) -> None:
        """Record how long training took in this epoch. Call after reading its metrics, which waits for the device."""
        self.control.end_train_epoch()
        self._train_seconds = self.log.clock.epoch_seconds()
        self._timings = gather_timings(self.log.clock, self._train_seconds, self.cpu_group)

    def emit_phase(self, phase: str) -> None:
        """Report what the run does now."""
        self.log.emit(PhaseChanged(phase=phase, step=self.data.position.step, epoch=self.data.position.epoch))

    def log_epoch(self, train: Metrics, evaluation: Evaluation, ema_evaluation: Evaluation | None) -> None:
        """Emit the journal event of the epoch. A collective."""
        data, position, log = self.data, self.data.position, self.log
        val, ema = evaluation.scores(), ema_evaluation.scores() if ema_evaluation is not None else None
        if self.config.device.empty_cache:
            # Other processes can use the memory.
            torch.cuda.empty_cache()
        seconds = log.clock.epoch_seconds()
        if self.is_last_epoch(position.epoch):
            log.flush()
        train_size = data.image_format.at_epoch(position.epoch).size
        log.emit(
            EpochEvent(
                epoch=position.epoch,
                step=position.step,
                train_loss=finite(train.loss),
                train_accuracy=train.accuracy,
                lr=finite(self.model.lr_at(position.epoch * data.sampler.steps_per_epoch)),
                seconds=round(seconds, 3),
                images_per_second=round(data.sampler.images_from_step(self._first_step) / self._train_seconds, 1),
                skipped_steps=log.skipped.total + round(sum(log.unreported()[1])),
                skipped_images=train.unread + evaluation.metrics.unread,
                train_size=train_size,
                flops=self.flops_by_size[train_size],
                data_wait=data_wait_share(self._timings),
                rank_timings=self._timings,
                val_loss=val.loss,
                val_accuracy=val.accuracy,
                val_top5=val.top5,
                metrics=val.metrics,
                ema_val_loss=ema.loss if ema is not None else UNSET,
                ema_val_accuracy=ema.accuracy if ema is not None else UNSET,
                ema_val_top5=ema.top5 if ema is not None else UNSET,
                ema_metrics=ema.metrics if ema is not None else UNSET,
            )
        )

    def monitored_value(self, evaluation: Evaluation) -> float | None:
        """Return the value of `run.monitor` on all ranks; None if it is unknown or not finite. A collective: only rank
        0 has what is computed from classes and by user code."""
        known = evaluation.scores().value(monitored_name(self.config))
        value = torch.tensor(math.nan if known is None else known, dtype=torch.float64)
        dist.broadcast(value, 0, group=self.cpu_group)
        return finite(value.item())

    def save_evaluation(self, evaluation: Evaluation, monitored: float | None) -> bool:
        """Write the evaluation file of the run; return whether the evaluation is the best so far."""
        epoch = self.data.position.epoch
        best = self.log.best.update(epoch, monitored, evaluation.metrics.loss)
        self.model.task.adopt(evaluation)
        if self.is_rank_0 and self.job.folder is not None:
            folder, last = self.job.folder, evaluation.to_stored(epoch)
            classes, task = tuple(self.data.source.classes), self.config.task.name

            def write() -> None:
                with folder.opened() as opened:
                    previous = find_record(opened.evaluation, EvaluationFile, MAX_EVALUATION_BYTES)
                    best_so_far = last if best or previous is None else previous.best
                    content = EvaluationFile(classes=classes, last=last, best=best_so_far, task=task)
                    write_record(opened.evaluation, content)

            self._evaluation_sink.attempt(write, force=best)
        return best

    def save_epoch_checkpoint(self, epoch: int, *, best: bool) -> None:
        """Write a checkpoint after the best and the last epoch, and every `checkpoint.every_epochs`. Raises
        FinalCheckpointError."""
        is_last = self.is_last_epoch(epoch)
        if best or is_last or epoch % self.config.checkpoint.every_epochs == 0:
            problem = self.control.checkpoints.write(best=best, background=not is_last)
            if is_last and problem is not None:
                raise FinalCheckpointError(
                    f"training is complete, but its last checkpoint could not be written ({problem}); fix the cause",
                )

    def is_last_epoch(self, epoch: int) -> bool:
        """Return whether training ends with this epoch. Call after its evaluation."""
        return epoch == self.config.run.epochs or self.log.early_stop.expired

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Restore everything but model and position from a checkpoint; warn of what cannot be restored."""
        for warning in restore_state(checkpoint, self.data, self.model, self.log, self.control.checkpoints):
            self.log.warn(warning)

    def run_started(self) -> RunStarted:
        """Return the event that describes the run."""
        data, model, sampler = self.data, self.model, self.data.sampler
        name = self.job.folder.name if self.job.folder else (self.config.run.name or "")
        return RunStarted(
            format=FORMAT,
            name=name,
            host=socket.gethostname(),
            world_size=sampler.world_size,
            devices=[rank_device.device for rank_device in self.rank_devices],
            ranks=self.rank_devices,
            backend=dist.get_backend(),
            start_method=self.job.start_method or "",
            monitor=monitored_name(self.config),
            monitor_mode="min" if self.log.monitor.better is Better.LOW else "max",
            epochs=self.config.run.epochs,
            global_batch=sampler.global_batch,
            steps_per_epoch=sampler.steps_per_epoch,
            train_images=sampler.train_images,
            val_images=sampler.val_images,
            test_images=self.data.source.num_images("test"),
            classes=len(self.data.source.classes),
            outputs=task_facts(self.config).outputs,
            parameters=count_parameters(model.network),
            precision=describe_precision(
                AmpChoice(self.config.precision.amp, self.job.amp_reason),
                tf32=model.uses_tf32,
                channels_last=model.memory_format is torch.channels_last,
            ),
            trainable_parameters=sum(p.numel() for p in model.network.parameters() if p.requires_grad),
            workers=data.pipeline.plan.workers,
            worker_type="threads" if uses_threads(self.config) else "processes",
            image_format=data.image_format.describe(),
            pipeline=data.pipeline.plan.pipeline,
            pipeline_reason=data.pipeline.plan.reason,
            pipeline_auto=self.config.data.pipeline == "auto",
            batch_size=sampler.batch_size,
            cores=self.job.plan.threads_per_rank,
            train_size=data.image_format.size,
            input=", ".join(filter(None, (data.image_format.describe(), self.job.input_source))),
            flops=self.flops_by_size[data.image_format.size],
            peak_tflops=self.peak_tflops,
            versions={"gputrain": version("gputrain"), "torch": torch.__version__, "python": platform.python_version()},
        )

    def warn_skipped_files(self) -> None:
        """Warn of the files of the dataset that are no readable images, and of the folders that are not used."""
        skipped = self.data.source.skipped
        if not skipped or not self.is_rank_0:
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
        self.log.emit(
            WarningEvent(
                message=f"{pluralize(len(skipped), 'item')} skipped: {', '.join(skipped[:MAX_LISTED_FILES])}{more}",
                code="bad-image",
            )
        )

    def emit_warnings(self, warnings: Sequence[Problem]) -> None:
        """Emit the notes of the setup, `warnings`, and those about disk space."""
        for problem in (*self.model.notes, *warnings):
            self.log.warn(problem)
        if self.is_rank_0 and self.job.folder is not None:
            folder, size = self.job.folder.checkpoints, weight_bytes(self.model.network)
            for problem in disk_warnings(self.config, folder, size):
                self.log.warn(problem)


def build_trainer(
    job: Job,
    rank_info: RankInfo,
    store: Store,
    channel: Channel,
    sampler: DistributedBatchSampler,
    pipeline: InputPipeline,
    checkpoint: dict[str, Any] | None = None,
) -> Trainer:
    """Build the device, model, optimizer and process group of one rank, and warm up. Raises UsageError."""
    config, source = job.config, pipeline.source
    device = init_device(config, job.plan, rank_info)
    # The same seed on every rank: EMA and master weights are copied before DDP broadcasts the weights of rank 0.
    seed_everything(config.run.seed)
    schedule = lr_of_step(job, sampler.num_devices, sampler.steps_per_epoch)
    state = checkpoint.get("task") if checkpoint else None
    task = build_task(config, source.classes, device, lambda: source.get_labels("train"), state)
    own_metrics = OwnMetrics(config, task, max(sampler.val_images, source.num_images("test")))
    model = Model(job, pipeline.image_format, task, sampler.num_devices, schedule, checkpoint)
    cpu_group, rank_devices = join_process_group(config, job.plan, device, rank_info, store)
    model.parallel = wrap_model(model.network, config.device, device, job.plan.devices_per_rank, sampler.world_size)
    position = resume_position(checkpoint, sampler)
    data = TrainingData(job, sampler, pipeline, device, model.memory_format, position)
    log = TrainingLog(config, device, channel, sampler.rank, position, sampler.global_batch)
    # Another seed on each rank: dropout must not drop the same units everywhere.
    seed_everything(config.run.seed + rank_info.rank)
    return Trainer(job, data, model, log, own_metrics, cpu_group, rank_devices)
