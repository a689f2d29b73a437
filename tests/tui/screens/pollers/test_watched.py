"""What all screens do when a file that they show is deleted, replaced, unreadable or growing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.base.files import file_stamp
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from support.gputrain_command import wait_for
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from tui.screens.pollers.files import watch_evaluations
from tui.screens.pollers.run import RunPoller
from tui.screens.pollers.watched import Poller, Watched


@dataclass
class Source:
    """A file that a screen shows, and its reader. `write` writes a version of it, `version` is what the reader has."""

    path: Path
    poller: Poller
    write: Callable[[int], object]
    version: Callable[[], int | None]
    is_journal: bool = False

    def poll(self) -> int | None:
        self.poller.poll()
        return self.version()


def of_value(poller: Watched[Any], version: Callable[[Any], int]) -> Callable[[], int | None]:
    return lambda: None if poller.value is None else version(poller.value)


def evaluations_source(folder: RunFolder) -> Source:
    def write(version: int) -> None:
        result = {"epoch": version, "loss": None, "top1": 1.0, "top5": 1.0, "images": 1, "per_class": [1.0, None]}
        folder.evaluation.write_text(json.dumps({"format": 1, "classes": ["a", "b"], "last": result, "best": result}))

    poller = watch_evaluations(folder)
    return Source(folder.evaluation, poller, write, of_value(poller, lambda value: value.last.epoch))


def write_journal(folder: RunFolder, version: int) -> None:
    events = [make_run_started(), *(make_epoch(epoch, 0.5) for epoch in range(1, version + 1))]
    folder.journal.write_text("".join(to_line(event) + "\n" for event in events))


def run_source(folder: RunFolder) -> Source:
    poller = RunPoller(folder)

    def version() -> int | None:
        return None if poller.latest is None else poller.latest.row.record.values.get("epochs")

    return Source(folder.journal, poller, lambda version: write_journal(folder, version), version, is_journal=True)


def log_source(folder: RunFolder) -> Source:
    """The log is a part of what the poller of a run publishes."""
    poller = RunPoller(folder)

    def write(version: int) -> None:
        folder.log.write_text("".join(f"line {line}\n" for line in range(version)))

    return Source(folder.log, poller, write, lambda: len(poller.log) or None)


SOURCES = (evaluations_source, log_source, run_source)


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__.removesuffix("_source"))
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A file of version 2 that has been read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source: Source = request.param(make_run_folder(tmp_path / "runs", "a", make_run_started()))
    source.write(2)
    assert source.poll() == 2
    return source


def test_deleted_file_is_shown_as_missing_until_it_is_there_again(source: Source) -> None:
    source.path.unlink()
    # The owner of a run restores its journal: the curves stay.
    assert source.poll() == (2 if source.is_journal else None)
    assert not isinstance(source.poller, Watched) or source.poller.problem is None
    source.write(3)
    assert source.poll() == 3


def test_replaced_file_is_read_anew(source: Source) -> None:
    source.path.rename(source.path.with_suffix(".away"))
    source.write(1)
    assert source.poll() == 1


def test_growing_file_is_read_when_it_has_grown(source: Source) -> None:
    for version in (3, 4, 9):
        source.write(version)
        assert source.poll() == version


def test_unreadable_file_keeps_what_was_read_before(source: Source) -> None:
    source.path.rename(source.path.with_suffix(".away"))
    source.path.mkdir()
    assert source.poll() == 2
    # The problem of a journal belongs to its follower.
    assert not isinstance(source.poller, Watched) or source.poller.problem is not None
    source.path.rmdir()
    source.write(3)
    assert source.poll() == 3
    assert not isinstance(source.poller, Watched) or source.poller.problem is None


def test_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    path, reads = tmp_path / "a", list[str]()
    path.write_text("1")
    poller = Watched("a", lambda: reads.append(path.read_text()), lambda: file_stamp(path))
    for _ in range(3):
        poller.poll()
    assert reads == ["1"]


def test_watched_polls_on_request_and_calls_back_after_each_poll() -> None:
    numbers, polled = iter(range(100)), list[int | None]()
    poller = Watched("number", lambda: next(numbers), interval_s=None)
    poller.on_poll = lambda: polled.append(poller.value)
    poller.on_first_result = lambda: polled.append(None)
    poller.start()
    for count in (2, 3, 4):
        wait_for(lambda count=count: len(polled) == count, "the poll", 5)
        poller.request_poll()
    poller.close()
    assert polled[:4] == [None, 0, 1, 2]
