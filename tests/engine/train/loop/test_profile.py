"""Profiles of training steps: which steps they have, what ends them early, and what is written."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from engine.runs.control import RequestCounters
from engine.runs.events import Event, Profiled
from engine.runs.folder import RunFolder
from engine.runs.profile_file import Profile, list_profiles, read_profile
from engine.train.distributed import agreement
from engine.train.loop import profile as profile_module
from engine.train.loop.loop import train_step, training_loop
from engine.train.loop.trainer import Trainer
from support.messages import says
from support.runs.in_process import single_rank_trainer

TINY = (
    "data.dataset=fake",
    "data.batch_size=4",
    "data.fake_val=4",
    "model.name=linear",
    "data.channels=1",
    "data.image_size=8",
)


@pytest.fixture(autouse=True)
def requests_are_polled_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "POLL_INTERVAL_SECONDS", 0.0)


@contextmanager
def live_trainer(folder: Path, events: list[Event], *overrides: str, steps_per_epoch: int = 200) -> Iterator[Trainer]:
    """Yield a trainer within its first epoch."""
    images = f"data.fake_train={4 * steps_per_epoch}"
    with single_rank_trainer(*TINY, images, *overrides, folder=folder, events=events) as trainer:
        trainer.start_epoch()
        yield trainer


def request(trainer: Trainer, steps: int) -> RequestCounters:
    """Request a profile of the trainer's run."""
    counters = trainer.log.channel.poll_requests()
    counters.apply("profile", steps)
    return counters


def train(trainer: Trainer, count: int) -> bool:
    """Train `count` steps; return whether they ended with a stop."""
    for _ in range(count):
        if trainer.control.handle_requests():
            return True
        train_step(trainer)
    return False


def profiled(events: list[Event]) -> list[tuple[int, int, str]]:
    return [(event.step, event.steps, event.message) for event in events if isinstance(event, Profiled)]


def only_profile(folder: Path) -> tuple[Path, Profile]:
    [name] = list_profiles(RunFolder(folder))
    return folder / "profile" / name, read_profile(RunFolder(folder), name)


def trace_events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def test_profile_has_requested_steps_in_record_and_trace(tmp_path: Path) -> None:
    events: list[Event] = []
    with live_trainer(tmp_path, events) as trainer:
        timer = trainer.log.clock
        train(trainer, 3)
        request(trainer, 4)
        before = time.perf_counter()
        train(trainer, 20)
        elapsed = time.perf_counter() - before
        assert trainer.log.clock is timer
        assert trainer.log.clock.profiled is None
    [(step, steps, message)] = profiled(events)
    assert (steps, message) == (4, "")
    folder, profile = only_profile(tmp_path)
    assert folder.name == f"step-{step:08d}"
    assert (profile.step, profile.steps, profile.requested, profile.device_type) == (step, 4, 4, "cpu")
    [rank] = profile.ranks
    assert len(rank.steps) == 4
    assert sum(part.mean for part in rank.parts.values()) == pytest.approx(rank.step_seconds)
    assert 0 < sum(rank.steps) < elapsed
    assert rank.parts["forward"].mean > 0
    assert rank.parts["backward"].mean > 0
    traced = trace_events(folder / rank.trace)
    assert any(event["name"] == "aten::addmm" for event in traced)
    marks = [event["name"] for event in traced if event.get("cat") == "user_annotation"]
    for number in range(step, step + 4):
        assert marks.count(f"gputrain: step {number}") == 1
    # With the step to warm up.
    assert marks.count("gputrain: backward") == marks.count("gputrain: forward") == 5


def test_requests_during_a_profile_are_answered_by_it(tmp_path: Path) -> None:
    events: list[Event] = []
    with live_trainer(tmp_path, events) as trainer:
        request(trainer, 3)
        train(trainer, 2)
        request(trainer, 50)
        train(trainer, 20)
        assert [steps for _, steps, _ in profiled(events)] == [3]
        request(trainer, 2)
        train(trainer, 20)
    assert [steps for _, steps, _ in profiled(events)] == [3, 2]


@pytest.mark.parametrize(("request_name", "expected"), [("stop", "the run ended"), ("pause", "the run was paused")])
def test_profile_ends_early_with_a_stop_or_pause(
    request_name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    with live_trainer(tmp_path, events) as trainer:
        requests = request(trainer, 100)
        train(trainer, 30)
        requests.apply(request_name)
        monkeypatch.setattr("engine.train.loop.control.time.sleep", lambda _: requests.apply("continue"))
        if train(trainer, 40):
            trainer.control.end_run("stopped")
    [(_, steps, message)] = profiled(events)
    assert 1 <= steps < 70
    assert message == only_profile(tmp_path)[1].note == expected


def test_stop_before_the_first_profiled_step_leaves_no_profile(tmp_path: Path) -> None:
    events: list[Event] = []
    with live_trainer(tmp_path, events) as trainer:
        requests = request(trainer, 10)
        train(trainer, 1)
        requests.apply("stop")
        assert train(trainer, 40)
        trainer.control.end_run("stopped")
    assert [(steps, message) for _, steps, message in profiled(events)] == [(0, "the run ended")]
    assert not (tmp_path / "profile").exists()


def test_profile_of_short_epochs_takes_the_steps_of_one_epoch(tmp_path: Path) -> None:
    events: list[Event] = []
    with live_trainer(tmp_path, events, "run.epochs=8", steps_per_epoch=4) as trainer:
        request(trainer, 10)
        training_loop(trainer)
    [(step, steps, message)] = profiled(events)
    assert (steps, message) == (2, "the epoch ended")
    assert step == 3, "the ranks agree on a request a step later, and the next step warms up"


def test_training_continues_without_a_profile_if_the_profiler_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(profile_module.profile):
        def __enter__(self) -> NoReturn:
            raise RuntimeError("Profiler is already enabled on this thread")

    events: list[Event] = []
    monkeypatch.setattr(profile_module, "profile", Broken)
    with live_trainer(tmp_path, events) as trainer:
        request(trainer, 2)
        train(trainer, 20)
    [(_, steps, message)] = profiled(events)
    assert steps == 0
    assert "rank 0" in message and "Profiler is already enabled" in message


def test_training_continues_if_the_profile_cannot_be_written(tmp_path: Path) -> None:
    events = list[Event]()
    (tmp_path / "profile").touch()
    with live_trainer(tmp_path, events) as trainer:
        request(trainer, 2)
        train(trainer, 20)
        assert trainer.data.position.step == 20
    [(_, steps, message)] = profiled(events)
    assert steps == 0 and says(message, "not-writable")
