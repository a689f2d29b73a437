"""A run as one rank lives it: epochs, evaluations, checkpoints, and what is told of them."""

from __future__ import annotations

import math
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from engine.data.pipelines.choose import Choice
from engine.data.sources.base import Source
from engine.distributed.failures import NoLastCheckpointError
from engine.distributed.rank_env import Seat
from engine.distributed.watchdog import Place
from engine.models.factory import count_parameters, weight_bytes
from engine.models.freeze import set_training
from engine.runs.control import Asked
from engine.runs.events import Continued, Epoch, Event, Paused, RunResumed, RunStarted, Warned
from engine.runs.records import RankDevice, RankEpochTiming
from engine.training.checkpoint_writer import CheckpointWriter
from engine.training.disk import disk_warnings
from engine.training.job import Job, Outcome
from engine.training.loop import evaluate, finish_training, forward_and_back, share_buffers, train_epoch
from engine.training.memory import collecting_between, gather_peaks, give_back, reset_peaks
from engine.training.metrics import Evaluation, Sums, Totals, evaluation_file
from engine.training.rank_state import Trainer
from engine.training.state_dict import restore_state
from engine.training.timing import Stopwatch, gather_work, share_waited
from engine.training.warmup import Tried
from engine.utils.files import read_json, write_json
from engine.utils.text import counted

SHOWN_FILES = 10
# Between two questions of paused ranks, whether they are to go on.
PAUSE_POLL_SECONDS = 0.1
# Garbage is collected after so many steps, by all ranks at once, and between two epochs: models of the user's own may
# make cycles that hold tensors.
GC_INTERVAL_STEPS = 500


class Fit:
    """One rank, set up and ready. `hosts` is a process group for what lies in host memory; `notes` are for the log."""

    def __init__(
        self,
        *,
        job: Job,
        seat: Seat,
        trainer: Trainer,
        source: Source,
        hosts: dist.ProcessGroup,
        ranks: list[RankDevice],
        notes: Sequence[str],
        choice: Choice,
        tried: Tried,
    ) -> None:
        self.config, self.job, self.seat, self.trainer, self.source = job.config, job, seat, trainer, source
        self.hosts, self.ranks, self.notes, self.choice, self.tried = hosts, ranks, notes, choice, tried
        self._checkpoint_writer = CheckpointWriter(trainer, source.classes, job.folder, hosts)
        self._epoch_clock = Stopwatch()
        self._collect_garbage: Callable[[], None] = lambda: None

    def run(self, warnings: Sequence[str]) -> Outcome:
        """`warnings` are told before the first step."""
        t, started = self.trainer, self._started()
        if self.job.resumed:
            self._tell(RunResumed(**vars(started), from_step=t.position.step))
        else:
            self._tell(started)
        self._tell_skipped()
        self._tell_shortages(warnings)
        self._write_classes()
        with collecting_between() as self._collect_garbage:
            return self._train()

    def _train(self) -> Outcome:
        t = self.trainer
        while t.position.epoch <= self.config.run.epochs:
            self._collect_garbage()
            self._epoch_clock, first = Stopwatch(), t.position.batch
            reset_peaks(t.device)
            t.work.begin()
            if not train_epoch(t, self._handle_requests):
                return self._stop()
            train = finish_training(t)
            # Now the device has done all that it was asked for.
            trained = self._epoch_clock.seconds()
            work = gather_work(t.work, trained, self.hosts)
            share_buffers(t.model)
            found = evaluate(t, self._handle_requests)
            if found is None:
                return self._stop()
            if self.config.device.empty_cache:
                give_back(t.device)
            rate = t.shares.images_from(first) / trained
            self._end_epoch(self._epoch_clock.seconds(), rate, work, train, *found)
        t.agree.settle()
        self._wait_for_all()
        return "finished"

    def _handle_requests(self) -> bool:
        """Do between two steps what is due and what was requested; return True where the run is to stop. All ranks do
        the same at the same step."""
        self._collect_garbage_if_due()
        agreed = self.trainer.agree(self._poll_requests)
        if self._checkpoint_writer.is_due(agreed):
            with self._clocks_stopped():
                self._checkpoint_writer.serve(agreed)
        if agreed.paused and not agreed.stop:
            with self._clocks_stopped():
                agreed = self._pause(agreed)
        return agreed.stop

    def _collect_garbage_if_due(self) -> None:
        position = self.trainer.position
        if position.batch and position.step % GC_INTERVAL_STEPS == 0:
            self._collect_garbage()

    def _poll_requests(self) -> Asked:
        """Return the requests that this rank knows of. The timer of checkpoints is rank 0's."""
        requests = self.trainer.channel.asked()
        if self.seat.rank == 0 and self._checkpoint_writer.timer_fires():
            requests.due += 1
        return requests

    @contextmanager
    def _clocks_stopped(self) -> Iterator[None]:
        """Time within it counts neither for the epoch nor for the rates of its steps."""
        with self._epoch_clock.stopped():
            yield
        self.trainer.log.restart_clock()

    def _pause(self, agreed: Asked) -> Asked:
        """Hold until all ranks agree to go on or to stop, and write the checkpoints that are due meanwhile."""
        t, step, epoch = self.trainer, self.trainer.position.step, self.trainer.position.epoch
        t.channel.at(step, Place.PAUSE)
        t.log.settle()
        self._tell(Paused(step=step, epoch=epoch))
        while agreed.paused and not agreed.stop:
            # Again: a checkpoint meanwhile was another phase.
            t.channel.at(step, Place.PAUSE)
            time.sleep(PAUSE_POLL_SECONDS)
            agreed = t.agree(self._poll_requests)
            if self._checkpoint_writer.is_due(agreed):
                self._checkpoint_writer.serve(agreed)
        if not agreed.stop:
            self._tell(Continued(step=step, epoch=epoch))
        return agreed

    def _end_epoch(
        self,
        seconds: float,
        rate: float,
        work: list[RankEpochTiming],
        train: Sums,
        found: Evaluation,
        averaged: Evaluation | None,
    ) -> None:
        """`averaged` is what the averaged weights were found to do, where there are such: they are what is kept as
        the best then."""
        t, epoch, every = self.trainer, self.trainer.position.epoch, self.config.checkpoint.every_epochs
        ends = epoch == self.config.run.epochs
        if ends:
            t.log.tell(t.position.step, epoch, t.lr(epoch, t.shares.steps_per_epoch))
            t.log.settle()
        val, lead = found.sums, averaged or found
        memory = gather_peaks(t.device, self.seat.rank, self.hosts)
        self._tell(
            Epoch(
                epoch=epoch,
                step=t.position.step,
                train_loss=train.loss,
                train_accuracy=train.accuracy,
                val_loss=val.loss,
                val_accuracy=val.accuracy,
                lr=t.lr(epoch, t.shares.steps_per_epoch),
                seconds=round(seconds, 3),
                images_per_second=round(rate, 1),
                skipped=t.log.skipped_so_far(),
                unread=train.unread + val.unread,
                val_top5=found.top5,
                memory=memory,
                data_wait=share_waited(work),
                work=work,
                ema_val_loss=averaged.sums.loss if averaged is not None else math.nan,
                ema_val_accuracy=averaged.sums.accuracy if averaged is not None else math.nan,
            )
        )
        t.plateau.see(lead.sums.loss)
        best = self._checkpoint_writer.update_best(epoch, lead.sums.accuracy)
        self._write_evaluation(lead.to_dict(epoch), best=best)
        t.position.epoch, t.position.batch = epoch + 1, 0
        t.totals = Totals(t.device)
        if best or ends or epoch % every == 0:
            problem = self._checkpoint_writer.write(best=best)
            if ends and problem is not None:
                raise NoLastCheckpointError(
                    f"training is done, and its last checkpoint could not be written ({problem}): mend that, and resume"
                )

    def _stop(self) -> Outcome:
        self.trainer.agree.settle()
        self._checkpoint_writer.write_before_stop()
        self._wait_for_all()
        return "stopped"

    def _wait_for_all(self) -> None:
        """A rank that leaves while rank 0 still saves would have srun end that one too."""
        self.trainer.channel.at(self.trainer.position.step, Place.SAVING)
        dist.barrier(group=self.hosts)

    def begin_anew(self) -> None:
        """A run that was begun before, and of which there is no checkpoint."""
        self._tell(Warned(message="there is no checkpoint of this run: it starts again from the beginning"))

    def restore(self, saved: dict[str, Any], damaged: Sequence[str]) -> None:
        """Go on from a checkpoint; the model and the position have been taken from it. `damaged` says what was wrong
        with those that are newer."""
        for one in damaged:
            self._tell(Warned(message=f"the checkpoint {one}; going on from the one before it"))
        self._checkpoint_writer.restore(saved)
        for warning in restore_state(self.trainer, saved, self.seat.rank):
            self._tell(Warned(message=warning))

    def try_one_batch(self, warnings: Sequence[str]) -> Outcome:
        """One real batch forward and back; weights and run are left alone. `warnings` are told before it."""
        t = self.trainer
        # First: a batch that finds no room may never come.
        self._tell_shortages(warnings)
        set_training(t.model, t.frozen)
        t.work.wait()
        batch = t.next_batch(t.totals)
        t.work.arrived()
        forward_and_back(t, batch, 0)
        self._tell(self._started())
        self._tell_skipped()
        return "finished"

    def _tell(self, event: Event) -> None:
        if self.seat.rank == 0:
            self.trainer.channel.send(event)

    def _started(self) -> RunStarted:
        t = self.trainer
        name = self.job.folder.name if self.job.folder else (self.config.run.name or "")
        return RunStarted(
            name=name,
            host=socket.gethostname(),
            world_size=self.seat.world_size,
            devices=[one.device for one in self.ranks],
            ranks=self.ranks,
            backend=self.job.plan.backend,
            epochs=self.config.run.epochs,
            global_batch=t.shares.global_batch,
            steps_per_epoch=t.shares.steps_per_epoch,
            train_images=t.shares.train_images,
            val_images=t.shares.val_images,
            classes=len(self.source.classes),
            parameters=count_parameters(t.model),
            trainable=sum(one.numel() for one in t.model.parameters() if one.requires_grad),
            workers=t.batches.workers,
            pipeline=self.choice.pipeline,
            pipeline_why=self.choice.why,
            batch_size=t.shares.batch_size,
            cores=self.job.plan.threads,
            least_step=self.tried.seconds,
            least_images=self.tried.images,
            compiled=self.config.model.compile,
            flops=self.tried.flops,
            peak_tflops=self.tried.peak_tflops,
            versions={"gputrain": version("gputrain"), "torch": torch.__version__, "python": platform.python_version()},
        )

    def _tell_skipped(self) -> None:
        skipped = self.source.skipped
        if not skipped or self.seat.rank != 0:
            return
        more = ""
        if len(skipped) > SHOWN_FILES:
            more = f", and {len(skipped) - SHOWN_FILES} more"
            if self.job.folder is not None:
                names = "\n".join(skipped) + "\n"
                with suppress(OSError):
                    self.job.folder.skipped_files.write_text(names, encoding="utf-8", errors="backslashreplace")
                    more += f", all named in {self.job.folder.skipped_files.name}"
        self._tell(
            Warned(message=f"{counted(len(skipped), 'file')} left out: {', '.join(skipped[:SHOWN_FILES])}{more}")
        )

    def _tell_shortages(self, warnings: Sequence[str]) -> None:
        disk: list[str] = []
        if self.seat.rank == 0 and self.job.folder is not None:
            disk = disk_warnings(self.config, self.job.folder.checkpoints, weight_bytes(self.trainer.model))
        for message in (*self.notes, *warnings, *disk):
            self._tell(Warned(message=message))

    def _write_evaluation(self, last: dict[str, Any], *, best: bool) -> None:
        if self.seat.rank == 0 and self.job.folder is not None:
            before = read_json(self.job.folder.evaluation) or {}
            kept = last if best else before.get("best", last)
            with suppress(OSError):
                write_json(self.job.folder.evaluation, evaluation_file(self.source.classes, last, kept))

    def _write_classes(self) -> None:
        if self.seat.rank == 0 and self.job.folder is not None:
            with suppress(OSError):
                write_json(self.job.folder.class_indices, {str(n): name for n, name in enumerate(self.source.classes)})
