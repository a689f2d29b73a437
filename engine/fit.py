"""A run as one rank lives it: epochs, evaluations, checkpoints, and what is told of them."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.checkpoint import keep_checkpoint, rng_state, save_checkpoint, set_rng_state
from engine.config import as_dict
from engine.data.source import Source
from engine.events import CheckpointSaved, Continued, Epoch, Event, Paused, RunResumed, RunStarted, Warned
from engine.files import write_json
from engine.job import Job, Outcome
from engine.limits import disk_warnings
from engine.lines import counted
from engine.loop import Totals, Trainer, evaluate, finish_training, share_buffers, train_epoch
from engine.models import count_parameters, weight_bytes
from engine.precision import autocast
from engine.problems import UsageError
from engine.seat import Seat

SHOWN_FILES = 10
# Between two questions of ranks that hold, whether they are to go on.
HOLD_SECONDS = 0.1


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is: its process, and the device that it has there, which it has seen to be the one."""

    rank: int
    host: str
    pid: int
    device: str


def gather_places(job: Job, seat: Seat, hosts: dist.ProcessGroup) -> list[RankPlace]:
    """Where all ranks are. A collective."""
    place = job.plan.place(seat.local_rank)
    mine = RankPlace(rank=seat.rank, host=socket.gethostname(), pid=os.getpid(), device=job.plan.devices[place])
    ranks = [mine] * seat.world_size
    dist.all_gather_object(ranks, mine, group=hosts)
    return ranks


def refuse_shared_devices(ranks: Sequence[RankPlace]) -> None:
    """Raises UsageError where two ranks have one GPU, which NCCL does not serve."""
    first: dict[tuple[str, str], int] = {}
    for one in ranks:
        if one.device != "cpu" and first.setdefault((one.host, one.device), one.rank) != one.rank:
            raise UsageError.one(
                "device.gpus",
                f"ranks {first[one.host, one.device]} and {one.rank} on {one.host} both have {one.device}; start no "
                "more ranks there than there are GPUs",
            )


class Fit:
    """One rank, set up and ready. `hosts` is a process group for what lies in host memory; `warnings` are to be told
    before the first step."""

    def __init__(
        self,
        job: Job,
        seat: Seat,
        trainer: Trainer,
        source: Source,
        hosts: dist.ProcessGroup,
        ranks: list[RankPlace],
        workers: int,
        warnings: Sequence[str] = (),
    ) -> None:
        self.config, self.job, self.seat, self.trainer, self.source = job.config, job, seat, trainer, source
        self.hosts, self.ranks, self.workers, self.warnings = hosts, ranks, workers, warnings
        self.best_epoch, self.best_accuracy = 0, -1.0
        self._checkpoints, self._held = 0, 0.0

    def run(self) -> Outcome:
        t, started = self.trainer, self._started()
        if self.job.resumed:
            self._tell(RunResumed(**asdict(started), from_step=t.position.step))
        else:
            self._tell(started)
            self._tell_skipped()
        self._tell_shortages()
        self._write_classes()
        while t.position.epoch <= self.config.run.epochs:
            began, first = time.perf_counter(), t.position.batch
            self._held = 0.0
            if not train_epoch(t, self._attend):
                return self._stop()
            trained = time.perf_counter() - began - self._held
            train_loss, train_accuracy = finish_training(t)
            share_buffers(t.model)
            evaluated = evaluate(t, self._attend)
            if evaluated is None:
                return self._stop()
            rate = t.shares.images_from(first) / trained
            seconds = time.perf_counter() - began - self._held
            self._end_epoch(seconds, rate, (train_loss, train_accuracy), evaluated)
        t.agree.settle()
        return "finished"

    def _attend(self) -> bool:
        """Between two steps: save a checkpoint where one was asked for, hold while the run is to pause; true where it
        is to stop. All ranks do the same."""
        t = self.trainer
        agreed = t.agree(t.channel.asked())
        held: float | None = None
        while not agreed.stop:
            if agreed.checkpoints > self._checkpoints:
                self._checkpoints = agreed.checkpoints
                began = time.perf_counter()
                self._save_between(asked=True)
                # Of a pause it is a part already.
                self._held += time.perf_counter() - began if held is None else 0.0
                t.log.restart_clock()
            if not agreed.paused:
                break
            if held is None:
                held = time.perf_counter()
                t.log.settle()
                self._tell(Paused(step=t.position.step, epoch=t.position.epoch))
            time.sleep(HOLD_SECONDS)
            agreed = t.agree(t.channel.asked())
        if held is not None:
            self._held += time.perf_counter() - held
            t.log.restart_clock()
            if not agreed.stop:
                self._tell(Continued(step=t.position.step, epoch=t.position.epoch))
        return agreed.stop

    def _end_epoch(
        self, seconds: float, rate: float, train: tuple[float, float], evaluated: tuple[float, float]
    ) -> None:
        t, epoch = self.trainer, self.trainer.position.epoch
        val_loss, val_accuracy = evaluated
        if epoch == self.config.run.epochs:
            t.log.tell(t.position.step, epoch, t.lr(epoch, t.shares.steps_per_epoch))
            t.log.settle()
        self._tell(
            Epoch(
                epoch=epoch,
                step=t.position.step,
                train_loss=train[0],
                train_accuracy=train[1],
                val_loss=val_loss,
                val_accuracy=val_accuracy,
                lr=t.lr(epoch, t.shares.steps_per_epoch),
                seconds=round(seconds, 3),
                images_per_second=round(rate, 1),
                skipped=t.position.skipped,
            )
        )
        best = val_accuracy > self.best_accuracy
        if best:
            self.best_epoch, self.best_accuracy = epoch, val_accuracy
        t.position.epoch, t.position.batch = epoch + 1, 0
        t.totals = Totals(t.device)
        self._save(ended=epoch, best=best)

    def _stop(self) -> Outcome:
        self.trainer.agree.settle()
        self._save_between()
        return "stopped"

    def _save_between(self, *, asked: bool = False) -> None:
        """Write a checkpoint within an epoch. All ranks are at the same step, with nothing under way between them but
        the log and a question whether to go on."""
        self.trainer.log.settle()
        share_buffers(self.trainer.model)
        self._save(asked=asked)

    def _save(self, ended: int | None = None, *, best: bool = False, asked: bool = False) -> None:
        """Write a checkpoint of all ranks, under the name of the epoch that it ends where it does. A collective."""
        t = self.trainer
        mine = {
            "rng": rng_state(t.device),
            "loss": t.totals.loss.cpu(),
            "counts": t.totals.counts.cpu(),
            "untold": t.log.untold(),
        }
        ranks: list[Any] | None = [None] * self.seat.world_size if self.seat.rank == 0 else None
        dist.gather_object(mine, ranks, group=self.hosts)
        if self.seat.rank != 0 or self.job.folder is None:
            return
        state = {
            "config": as_dict(self.config),
            "classes": list(self.source.classes),
            "model": t.model.state_dict(),
            "optimizer": t.optimizer.state_dict(),
            "scaler": t.scaler.state_dict(),
            "epoch": t.position.epoch,
            "batch": t.position.batch,
            "step": t.position.step,
            "skipped": t.position.skipped,
            "global_batch": t.shares.global_batch,
            "best_epoch": self.best_epoch,
            "best_accuracy": self.best_accuracy,
            "ranks": ranks,
        }
        try:
            path = save_checkpoint(state, self.job.folder.checkpoints)
            if ended is not None:
                keep_checkpoint(self.job.folder.checkpoints, ended, best=best, keep=self.config.checkpoint.keep)
        except OSError as error:
            self._tell(Warned(message=f"the checkpoint of step {t.position.step} could not be written: {error}"))
            return
        relative = str(path.relative_to(self.job.folder.path))
        saved = CheckpointSaved(path=relative, step=t.position.step, epoch=t.position.epoch, best=best, asked=asked)
        self._tell(saved)

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint; the model and the position have been taken from it. With another number of ranks the
        sums are kept, by rank 0, and random numbers are drawn anew."""
        t, ranks = self.trainer, saved["ranks"]
        # The checkpoint brings the optimizer's state, the config its settings: they may be changed on the way.
        settings = [
            {key: value for key, value in group.items() if key != "params"} for group in t.optimizer.param_groups
        ]
        t.optimizer.load_state_dict(saved["optimizer"])
        for group, own in zip(t.optimizer.param_groups, settings, strict=True):
            group.update(own)
        if saved["scaler"] and t.scaler.is_enabled():
            t.scaler.load_state_dict(saved["scaler"])
        self.best_epoch, self.best_accuracy = saved["best_epoch"], saved["best_accuracy"]
        if len(ranks) == self.seat.world_size:
            mine = ranks[self.seat.rank]
            t.totals.loss += mine["loss"].to(t.device)
            t.totals.counts += mine["counts"].to(t.device)
            t.log.take_back(mine["untold"])
            set_rng_state(mine["rng"], t.device)
        elif self.seat.rank == 0:
            t.totals.loss += sum(one["loss"] for one in ranks).to(t.device)
            t.totals.counts += sum(one["counts"] for one in ranks).to(t.device)
        if len(ranks) != self.seat.world_size or saved["global_batch"] != t.shares.global_batch:
            before = f"{len(ranks)} ranks and a global batch of {saved['global_batch']}"
            now = f"{self.seat.world_size} and {t.shares.global_batch}"
            self._tell(
                Warned(
                    message=f"the checkpoint is of {before}, and this run has {now}: batches are dealt out anew, so "
                    "results differ from those of an uninterrupted run"
                )
            )

    def try_one_batch(self) -> Outcome:
        """One real batch forward and back; weights and run are left alone."""
        t = self.trainer
        # First: a batch that finds no room may never come.
        self._tell_shortages()
        t.model.train()
        images, labels, _ = t.next_batch()
        with autocast(self.config.precision, t.device):
            loss = F.cross_entropy(t.ddp(images), labels)
        t.scaler.scale(loss).backward()
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
            ranks=[asdict(one) for one in self.ranks],
            backend=self.job.plan.backend,
            epochs=self.config.run.epochs,
            global_batch=t.shares.global_batch,
            steps_per_epoch=t.shares.steps_per_epoch,
            train_images=t.shares.train_images,
            val_images=t.shares.val_images,
            classes=len(self.source.classes),
            parameters=count_parameters(t.model),
            workers=self.workers,
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

    def _tell_shortages(self) -> None:
        disk: list[str] = []
        if self.seat.rank == 0 and self.job.folder is not None:
            disk = disk_warnings(self.config, self.job.folder.checkpoints, weight_bytes(self.trainer.model))
        for message in (*self.warnings, *disk):
            self._tell(Warned(message=message))

    def _write_classes(self) -> None:
        if self.seat.rank == 0 and self.job.folder is not None:
            with suppress(OSError):
                write_json(self.job.folder.class_indices, {str(n): name for n, name in enumerate(self.source.classes)})
