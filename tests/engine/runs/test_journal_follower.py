"""The follower of a journal: growing, replaced, missing and unreadable journals, and the selection of events."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runs import journal as journal_module
from engine.runs.events import EpochEvent, Event, RunStarted
from engine.runs.journal import JournalFollower, to_line
from support.runs.event_factories import make_epoch, make_run_started, make_step


def append(journal: Path, *events: Event) -> None:
    with journal.open("a") as file:
        file.writelines(to_line(event) + "\n" for event in events)


def read(follower: JournalFollower) -> tuple[bool, list[Event]]:
    return follower.look(), list(follower.events())


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    append(path, make_run_started(), make_step(1))
    return path


@pytest.mark.parametrize("is_shorter", [True, False])
def test_follower_starts_over_when_journal_is_replaced(journal: Path, is_shorter: bool) -> None:
    follower = JournalFollower(journal)
    read(follower)
    other = journal.with_suffix(".new")
    append(other, *(make_epoch(number, 0.5) for number in range(1, 2 if is_shorter else 20)))
    other.replace(journal)
    was_replaced, events = read(follower)
    assert was_replaced and {type(event) for event in events} == {EpochEvent}
    assert read(follower) == (False, [])


def test_follower_keeps_its_place_while_journal_is_missing(journal: Path) -> None:
    follower = JournalFollower(journal)
    read(follower)
    journal.rename(journal.with_suffix(".away"))
    assert read(follower) == (False, []) and follower.problem is None
    journal.with_suffix(".away").rename(journal)
    append(journal, make_step(2))
    assert read(follower) == (False, [make_step(2)])


def test_follower_reports_unreadable_journal_until_it_can_be_read(journal: Path) -> None:
    follower, target = JournalFollower(journal), journal.with_suffix(".target")
    journal.rename(target)
    journal.symlink_to(target)
    assert read(follower) == (False, [])
    assert follower.problem is not None and follower.problem.startswith("events.jsonl cannot be read: ")
    journal.unlink()
    target.rename(journal)
    assert len(read(follower)[1]) == 2
    assert follower.problem is None


def test_follower_reads_long_journal_in_parts(tmp_path: Path) -> None:
    journal, line = tmp_path / "events.jsonl", to_line(make_step(1)) + "\n"
    journal.write_text(line * 1000)
    follower = JournalFollower(journal)
    follower.look()
    assert len(follower.read(100 * len(line))) == 100
    assert follower.unread_bytes == 900 * len(line)
    assert len(list(follower.events())) == 900


def test_follower_with_kinds_reads_other_events_from_the_end_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "events.jsonl"
    events = [make_run_started(), *(make_step(step) for step in range(50)), make_epoch(1, 0.5)]
    events += [make_step(step) for step in range(50, 60)]
    append(journal, *events)
    tail = len("".join(to_line(event) + "\n" for event in events[-5:]))
    monkeypatch.setattr(journal_module, "TAIL_BYTES", tail)
    follower = JournalFollower(journal, (RunStarted, EpochEvent))
    _, found = read(follower)
    assert found == [events[0], events[51], *events[-5:]]
    append(journal, make_step(60))
    assert read(follower)[1] == [make_step(60)]
