"""Between two steps: checkpoints, pauses and stops, and the clocks that exclude them."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.config.loader import validate_config
from engine.runs.events import CheckpointSaved, Event, RunContinued, RunPaused, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.recorder import Recorder
from engine.train.distributed.failures import NonFiniteLossError
from engine.train.loop import checkpoint_writer, control, model
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.loop import train_step
from engine.train.loop.trainer import Trainer
from support.messages import raises_problem
from support.runs.in_process import single_rank_trainer


def steps(trainer: Trainer, count: int) -> int:
    """Train up to `count` steps; return how many were taken before a stop."""
    for number in range(count):
        if trainer.control.handle_requests():
            return number
        train_step(trainer)
    return count


def checkpoints(events: list[Event]) -> list[tuple[int, bool]]:
    return [(event.step, event.requested) for event in events if isinstance(event, CheckpointSaved)]


def test_checkpoint_writer_writes_every_n_steps_once_per_step(tmp_path: Path) -> None:
    events: list[Event] = []
    with single_rank_trainer("checkpoint.every_steps=3", folder=tmp_path, events=events) as trainer:
        steps(trainer, 8)
        # An evaluation handles requests without taking steps.
        trainer.control.handle_requests()
        trainer.control.handle_requests()
        trainer.control.checkpoints.wait()
    assert checkpoints(events) == [(3, False), (6, False)]


def test_checkpoint_writer_writes_when_its_timer_fires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, clock = list[Event](), SimpleNamespace(now=1000.0)
    monkeypatch.setattr(checkpoint_writer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with single_rank_trainer("checkpoint.every_minutes=5", folder=tmp_path, events=events) as trainer:
        steps(trainer, 4)
        clock.now += 300
        assert not trainer.control.checkpoints.timer_fires()
        clock.now += 0.1
        steps(trainer, 40)
        trainer.control.checkpoints.wait()
        assert not trainer.control.checkpoints.timer_fires()
    [(step, requested)] = checkpoints(events)
    assert 4 < step < 44
    assert not requested


def test_checkpoint_writer_flushes_journal_to_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, fsync = [], os.fsync

    def fsync_and_note(fd: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    recorder = Recorder(RunFolder(tmp_path), validate_config({}), lambda _: None)
    monkeypatch.setattr(os, "fsync", fsync_and_note)
    with single_rank_trainer(folder=tmp_path, record=recorder.record) as trainer:
        steps(trainer, 1)
        assert trainer.control.checkpoints.write() is None
    recorder.close()
    assert flushed[0] == "events.jsonl", "a crash must not leave a checkpoint of steps that the journal lacks"
    assert "step-00000001.pt" in flushed[1]


def test_checkpoint_before_stop_contains_buffers_of_rank_0_and_was_not_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, shared = list[Event](), list[torch.Tensor]()
    with single_rank_trainer(folder=tmp_path, events=events) as trainer:
        monkeypatch.setattr(model, "broadcast_tensors", shared.extend)
        trainer.control.checkpoints.write_before_stop()
        assert list(map(id, shared)) == list(map(id, trainer.model.network.buffers())) != []
    assert checkpoints(events) == [(0, False)]


def test_checkpoint_before_stop_is_not_written_after_a_nonfinite_loss(tmp_path: Path) -> None:
    with single_rank_trainer("run.log_every=10", folder=tmp_path) as trainer:
        with torch.no_grad():
            next(trainer.model.network.parameters()).fill_(math.nan)
        steps(trainer, 1)
        with raises_problem("non-finite", None, "step 1", kind=NonFiniteLossError):
            trainer.control.checkpoints.write_before_stop()
    assert not (tmp_path / "checkpoints").exists()


def test_checkpoint_writer_keeps_best_epoch_on_resume(tmp_path: Path) -> None:
    with single_rank_trainer(folder=tmp_path) as trainer:
        trainer.control.checkpoints.write()
        fresh = load_checkpoint(tmp_path / "checkpoints" / "last.pt")
        assert (fresh["best_epoch"], fresh["best_accuracy"]) == (0, -1.0)
        assert trainer.log.best.update(1, 0.9, 0.5)
        trainer.control.checkpoints.write()
    with single_rank_trainer(folder=tmp_path, checkpoint=tmp_path / "checkpoints" / "last.pt") as trainer:
        best = trainer.log.best
        assert not best.update(2, 0.9, 0.6)
        assert not best.update(3, 0.8, 0.1)
        trainer.control.checkpoints.write()
        resumed = load_checkpoint(tmp_path / "checkpoints" / "last.pt")
        assert (resumed["best_epoch"], resumed["best_accuracy"], resumed["best_loss"]) == (1, 0.9, 0.5)
        losses = {4: 0.5, 5: 0.4, 6: math.nan}
        assert [best.update(epoch, 0.9, loss) for epoch, loss in losses.items()] == [True, True, False]


def test_skipped_steps_in_a_row_are_counted_across_a_resume(tmp_path: Path) -> None:
    # Two of the three skipped steps have been reported when the checkpoint is written.
    skip = ["optim.nonfinite=skip", "optim.nonfinite_limit=3", "run.log_every=2"]
    with single_rank_trainer(*skip, folder=tmp_path) as trainer:
        with torch.no_grad():
            next(trainer.model.network.parameters()).fill_(math.nan)
        steps(trainer, 3)
        trainer.control.checkpoints.write_before_stop()
    with single_rank_trainer(*skip, folder=tmp_path, checkpoint=tmp_path / "checkpoints" / "last.pt") as trainer:
        assert trainer.log.skipped.total + sum(trainer.log.unreported()[1]) == 3
        steps(trainer, 1)
        with raises_problem("non-finite", None, "4 steps", kind=NonFiniteLossError):
            trainer.log.check()


@pytest.mark.parametrize("end", ["continue", "stop"])
def test_pause_writes_requested_checkpoint_and_stops_clocks(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    with single_rank_trainer(folder=tmp_path, events=events) as trainer:
        requests, sleeps = trainer.log.channel.poll_requests(), 0
        sleep = time.sleep

        def hold(_: float) -> None:
            nonlocal sleeps
            sleeps += 1
            sleep(0.1)
            if sleeps in (2, 6):
                requests.apply("checkpoint" if sleeps == 2 else end)

        monkeypatch.setattr(control.time, "sleep", hold)
        steps(trainer, 2)
        requests.apply("pause")
        start, before = time.perf_counter(), trainer.log.clock.epoch_seconds()
        done = steps(trainer, 40)
        elapsed, counted = time.perf_counter() - start, trainer.log.clock.epoch_seconds() - before
        assert sleeps >= 6
        assert elapsed - counted >= 0.1 * sleeps
        assert time.perf_counter() - trainer.log.clock._steps_start < elapsed - 0.5
        assert (done == 40) is (end == "continue")
    pause_events = [event for event in events if isinstance(event, RunPaused | RunContinued | CheckpointSaved)]
    assert [type(event) for event in pause_events] == [
        RunPaused,
        CheckpointSaved,
        *([RunContinued] if end == "continue" else []),
    ]
    assert len({event.step for event in pause_events}) == 1
    assert [requested for _, requested in checkpoints(events)] == [True]


def test_checkpoint_writer_rate_limits_full_disk_warnings_except_for_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    events: list[Event] = []
    with single_rank_trainer(folder=tmp_path, events=events) as trainer:
        monkeypatch.setattr(checkpoint_writer, "save_checkpoint", full)
        writer, warnings = trainer.control.checkpoints, []
        for write in (
            writer.write,
            writer.write,
            lambda: writer.write(requested=True),
            writer.write_before_stop,
            writer.write,
        ):
            write()
            warnings.append(sum(isinstance(event, WarningEvent) for event in events))
        writer._last_save_warning = time.monotonic() - checkpoint_writer.SAVE_WARNING_INTERVAL_SECONDS - 1
        assert writer.write() == "No space left on device"
    assert warnings == [1, 1, 2, 3, 3]
    shown = [event for event in events if isinstance(event, WarningEvent)]
    assert [event.code for event in shown] == ["not-writable"] * 4
    assert all("step 0 " in event.message and ": No space left on device" in event.message for event in shown)
