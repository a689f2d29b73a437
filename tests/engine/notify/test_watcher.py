"""The watcher follows one session to its end, sends its messages and logs its own failure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.notify import outbox, watcher
from engine.notify.message import Message
from engine.notify.observer import WatchOptions
from engine.notify.sender import Delivery
from engine.notify.watcher import watch
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.utils.codec import decode, encode
from support.replace import replace
from support.runs.event_factories import make_run_started
from support.runs.factories import append_events, make_run_folder


@dataclass
class Destination:
    """Takes the place of the helper process that sends messages."""

    sent: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def send(
        self, message: Message, urls: Sequence[str], labels: object, timeout_s: float, *, in_background: bool
    ) -> list[Delivery]:
        assert in_background and timeout_s == outbox.TRY_TIMEOUT_SECONDS
        # The first try fails.
        self.sent.append((message.occasion, tuple(urls)))
        return [Delivery("env:A", sent=len(self.sent) > 1)]


@pytest.fixture
def destination(monkeypatch: pytest.MonkeyPatch) -> Destination:
    destination = Destination()
    monkeypatch.setattr(outbox, "send_message", destination.send)
    return destination


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path, "run")


def make_options(folder: RunFolder) -> WatchOptions:
    return WatchOptions(
        folder=str(folder.path),
        inode=folder.path.stat().st_ino,
        owner_pid=os.getpid(),
        journal_start=0,
        urls=("env:A",),
        on=("finished",),
        retry_delays_s=(0.0,),
    )


def test_watcher_sends_end_of_session_until_it_arrives(folder: RunFolder, destination: Destination) -> None:
    append_events(folder, make_run_started(1.0), RunFinished(time=2.0, state="finished"))
    watch(make_options(folder), poll_s=0.0)
    assert destination.sent == [("finished", ("env:A",))] * 2
    assert len(folder.notify_log.read_text().splitlines()) == 2


def test_watcher_polls_until_session_ends(
    folder: RunFolder, destination: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_events(folder, make_run_started(1.0))
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 3:
            append_events(folder, RunFinished(time=2.0, state="finished"))

    monkeypatch.setattr(watcher.time, "sleep", sleep)
    watch(replace(make_options(folder), crash_grace_s=3600.0), poll_s=0.5)
    # The fourth wait is the one before the retry.
    assert polls == [0.5] * 4
    assert len(destination.sent) == 2


def test_watcher_leaves_folder_that_took_the_place_of_its_run(folder: RunFolder, destination: Destination) -> None:
    append_events(folder, make_run_started(1.0), RunFinished(time=2.0, state="finished"))
    watch(replace(make_options(folder), inode=1), poll_s=0.0)
    assert destination.sent == []


def test_watcher_logs_why_it_failed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    append_events(folder, make_run_started(1.0), RunFinished(time=2.0, state="finished"))
    monkeypatch.setattr(outbox, "send_message", lambda *_, **__: {}["lost"])
    with pytest.raises(KeyError):
        watch(make_options(folder), poll_s=0.0)
    assert "KeyError: 'lost'" in folder.notify_log.read_text()


def test_options_of_watcher_survive_json(folder: RunFolder) -> None:
    options = make_options(folder)
    assert decode(encode(options), WatchOptions) == options
