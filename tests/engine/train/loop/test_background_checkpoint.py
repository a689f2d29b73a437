"""Checkpoints that a thread writes during training: their content, the order of their events, and their failures."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.runs.events import CheckpointSaved, Event
from engine.runs.folder import RunFolder
from engine.train.distributed.failures import FinalCheckpointError
from engine.train.distributed.watchdog import Phase
from engine.train.loop import checkpoint_writer
from engine.train.loop.checkpoint import load_checkpoint, load_newest, save_checkpoint
from engine.train.loop.loop import train_step
from engine.train.loop.train import run_training
from engine.train.loop.trainer import Trainer
from support.runs.in_process import single_rank_trainer

SMALL = ("model.name=linear", "run.epochs=1")


class HeldWriter:
    """A `save_checkpoint` that waits until it is released, and then calls the real one or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started, self.released, self.error = threading.Event(), threading.Event(), error
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Path:
        self.calls += 1
        self.started.set()
        assert self.released.wait(30)
        if self.error is not None:
            raise self.error
        return save_checkpoint(*args, **kwargs)


@contextmanager
def held_trainer(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    events: list[Event],
    *overrides: str,
    recipe: tuple[str, ...] = SMALL,
    error: Exception | None = None,
) -> Iterator[tuple[Trainer, HeldWriter]]:
    held = HeldWriter(error)
    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", held)
    with single_rank_trainer(*recipe, *overrides, folder=folder, events=events) as trainer:
        try:
            yield trainer, held
        finally:
            held.released.set()
            trainer.control.checkpoints._thread.shutdown()


def take_steps(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        assert not trainer.control.handle_requests()
        train_step(trainer)


def saved_steps(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, CheckpointSaved)]


def assert_same(first: Any, second: Any) -> None:
    if isinstance(first, Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_same(value, second[key])
    elif isinstance(first, list | tuple):
        for value, other in zip(first, second, strict=True):
            assert_same(value, other)
    else:
        assert first == second


@pytest.mark.parametrize("precision", ["off", "O3"])
def test_background_checkpoint_equals_synchronous_one_while_training_goes_on(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    recipe = ("model.name=cnn", "model.ema=0.9", f"precision.amp={precision}")
    with held_trainer(monkeypatch, tmp_path, events, recipe=recipe) as (trainer, held):
        held.released.set()
        take_steps(trainer, 3)
        trainer.control.checkpoints.write()
        expected = load_checkpoint(tmp_path / "checkpoints" / "last.pt")
        held.started.clear()
        held.released.clear()
        trainer.control.checkpoints.write(background=True)
        assert held.started.wait(30)
        take_steps(trainer, 2)
        assert (trainer.data.position.step, saved_steps(events)) == (5, [3]), "training goes on"
        held.released.set()
        trainer.control.checkpoints.wait()
    assert saved_steps(events) == [3, 3]
    assert_same(expected, load_checkpoint(tmp_path / "checkpoints" / "last.pt"))


def test_stop_waits_for_checkpoint_in_flight_and_writes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    with held_trainer(monkeypatch, tmp_path, events) as (trainer, held):
        trainer.control.checkpoints.write(background=True)
        take_steps(trainer, 1)

        def release_in_phase(phase: Phase) -> None:
            if phase is Phase.CHECKPOINT:
                held.released.set()

        # The supervisor waits for a stop that is slow only in this phase.
        monkeypatch.setattr(trainer.log, "enter_phase", release_in_phase)
        trainer.control.end_run("stopped")
        assert saved_steps(events) == [0, 1]
    assert load_newest(tmp_path / "checkpoints")[1]["step"] == 1


def test_checkpoint_in_flight_is_not_lost_if_training_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a fault of the test")

    events: list[Event] = []
    with held_trainer(monkeypatch, tmp_path, events, "checkpoint.every_steps=2") as (trainer, held):
        trainer.log.add_step = fail  # type: ignore[assignment, method-assign]
        trainer.control.checkpoints.write(background=True)
        threading.Timer(0.2, held.released.set).start()
        with pytest.raises(ValueError, match="a fault of the test"):
            run_training(trainer, [])
    assert saved_steps(events) == [0]
    assert load_newest(tmp_path / "checkpoints")[1]["step"] == 0


# What the thread calls in the order of a save, and the step of the newest intact checkpoint if it is killed there.
KILLED_AT = {
    "engine.train.loop.checkpoint._HashingWriter._write_hashed": 1,
    "os.fsync": 1,
    "pathlib.Path.replace": 1,
    "engine.train.loop.checkpoint.checkpoints_by_step": 2,
    "engine.train.loop.checkpoint.link_file": 2,
    "engine.train.loop.checkpoint.fsync_folder": 2,
}


def train_until_killed(function: str, folder: Path) -> None:
    """Write a checkpoint, and another one in whose background thread a function kills this process."""
    with single_rank_trainer(*SMALL, folder=folder) as trainer:
        take_steps(trainer, 1)
        trainer.control.checkpoints.write()
        with patch(function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)):
            take_steps(trainer, 1)
            trainer.control.checkpoints.write(background=True)
            take_steps(trainer, 10)
            trainer.control.checkpoints.wait()


def kill_in_each_function(root: Path) -> None:
    """Fork a process for each function, which has the imports of this one. Autograd has not worked here, so it may."""
    for number, function in enumerate(KILLED_AT):
        (root / str(number)).mkdir()
        rank = multiprocessing.get_context("fork").Process(
            target=train_until_killed, args=(function, root / str(number))
        )
        rank.start()
        rank.join(200)
        assert rank.exitcode == -signal.SIGKILL, function


def test_kill_while_the_thread_writes_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    starter = multiprocessing.get_context("forkserver").Process(target=kill_in_each_function, args=(tmp_path,))
    starter.start()
    starter.join()
    assert starter.exitcode == 0
    for number, (function, step) in enumerate(KILLED_AT.items()):
        _, state, damaged = load_newest(tmp_path / str(number) / "checkpoints")
        assert (state["step"], damaged) == (step, []), function


def test_wait_continues_the_heartbeat_only_while_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[int] = []
    monkeypatch.setattr(checkpoint_writer, "WAIT_HEARTBEAT_SECONDS", 0.02)
    with held_trainer(monkeypatch, tmp_path, [], error=OSError(5, "I/O error")) as (trainer, held):
        trainer.control.checkpoints.write(background=True)
        monkeypatch.setattr(trainer.log, "enter_phase", phases.append)

        def write_some() -> None:
            trainer.control.checkpoints._written_sizes.append(1)
            threading.Timer(0.3, held.released.set).start()

        threading.Timer(0.1, write_some).start()
        trainer.control.checkpoints.wait()
    assert len(phases) == 1


def test_nothing_is_written_to_the_folder_that_took_the_place(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    events: list[Event] = []
    with single_rank_trainer(*SMALL, folder=tmp_path / "a", events=events) as trainer:
        trainer.job = replace(trainer.job, folder=RunFolder(tmp_path / "a").identified())
        trainer.control.checkpoints._folder = trainer.job.folder
        (tmp_path / "a").rename(tmp_path / "moved")
        (tmp_path / "a").mkdir()
        with pytest.raises(FinalCheckpointError):
            run_training(trainer, [])
    assert list((tmp_path / "a").iterdir()) == []
    assert saved_steps(events) == []
