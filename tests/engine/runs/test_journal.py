"""The journal: append-only JSON lines that survive a crash, and the history and summary derived from them."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest

from engine.runs.events import (
    CheckpointSaved,
    ControlEvent,
    EpochEvent,
    Event,
    RunFinished,
    StepEvent,
    WarningEvent,
)
from engine.runs.history import history_from_events
from engine.runs.journal import (
    MAX_LINE_BYTES,
    Journal,
    JournalReader,
    find_session_problem,
    from_line,
    to_line,
)
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step


def test_journal_line_round_trips_every_event() -> None:
    events: list[Event] = [
        *(
            make_run_started(),
            make_run_resumed(3, 1.0),
            make_step(1),
            make_epoch(1),
            WarningEvent(message="ä \x1b[31m", code="bad-image"),
            WarningEvent(message="dog/\udcff.txt", code="bad-image"),
        ),
        *(CheckpointSaved(path="p", step=1, epoch=1), ControlEvent(request="stop", by="me", outcome="yes")),
        RunFinished(state="failed", message="why"),
    ]
    for event in events:
        assert to_line(event).isprintable()
        parsed = from_line(to_line(event))
        assert type(parsed) is type(event)
        assert to_line(parsed) == to_line(event)


def test_journal_line_writes_non_finite_numbers_as_null() -> None:
    line = to_line(
        StepEvent(step=1, epoch=1, losses=[math.nan, 1.0, math.inf], lr=0.1, images_per_second=1.0, data_wait=0.0)
    )
    assert json.loads(line)["losses"] == [None, 1.0, None]


def test_from_line_ignores_unknown_types_and_fields() -> None:
    assert from_line('{"type": "telepathy", "time": 1}') is None
    more = json.loads(to_line(make_step(4))) | {"mood": "good"}
    assert from_line(json.dumps(more)) == make_step(4)


ODD_LINES = (
    b"", b"[]", b"1", b"{", b'{"type": "step"}', b'{"type": ["step"], "time": 1}', b'{"type": "future", "time": 1.0}',
    b'{"type": "warning", "code": "c", "time": 1.0, "message": NaN}',
    b'{"type": "warning", "code": "c", "time": Infinity, "message": "a"}',
    b'{"type": "warning", "code": "c", "time": 1e400, "message": "a"}',
    b'{"type": "warning", "code": "c", "time": 1.0, "message": "\\ud800"}',
    b'{"type": "warning", "code": "c", "time": 1.0, "message": "\xff"}',
    b'{"type": "warning", "code": "c", "time": 01, "message": "a"}',
    b'{"type": "warning", "code": "c", "time": 1, "time": 2, "message": "a"}',
    b'{"type": "warning", "code": "c", "time": 1, "message": 5}',
    b'{"type": "warning", "code": "c", "time": 1, "message": "a", "new": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"type": "step", "time": 1, "step": 10, "epoch": 1, "losses": [1.5, null, NaN, -Infinity, 2, 1e-320], "lr": 0.1, '
    b'"images_per_second": 1e3, "data_wait": 0, "grad_norm": NaN}',
    b'{"type": "step", "time": 1, "step": 10, "epoch": 1, "losses": [true], "lr": 0.1, "images_per_second": 1, '
    b'"data_wait": 0}',
    b'{"type": "step", "time": 1, "step": 123456789012345678901234567890, "epoch": 1, "losses": [], "lr": 0.1, '
    b'"images_per_second": 1, "data_wait": 0}',
)  # fmt: skip


def test_from_line_returns_only_valid_events_of_odd_lines() -> None:
    read = [(number, event) for number, line in enumerate(ODD_LINES) if (event := from_line(line)) is not None]
    assert [(number, getattr(event, "message", None)) for number, event in read] == [(11, "\ufffd"), (13, "a")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "has format 2, but this gputrain reads format 1"),
        ({"format": None}, "has no format, but this gputrain reads format 1"),
        ({"ranks": None}, "is damaged: $.ranks: expected array, got null"),
    ],
    ids=["later format", "no format", "damaged"],
)
def test_journal_reader_reports_run_of_another_format(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    started = json.loads(to_line(make_run_started())) | change
    (tmp_path / "events.jsonl").write_text(json.dumps(started) + "\n" + to_line(make_step(1)) + "\n")
    reader = JournalReader(tmp_path / "events.jsonl")
    assert list(reader.poll()) == [make_step(1)]
    assert reader.problem == f"events.jsonl {reason}"


def test_session_start_of_invalid_text_is_reported_and_raises_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type":"run_started","time":1,"format":"\xff"}\n')
    assert find_session_problem(path) is not None
    path.write_text(
        to_line(WarningEvent(message="run_started", code="recovered")) + "\n" + to_line(make_run_started()) + "\n"
    )
    assert find_session_problem(path) is None


def test_journal_reader_reads_incomplete_last_line_once_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = to_line(make_step(1)) + "\n"
    incomplete = to_line(make_step(2))
    path.write_text(whole + incomplete[:20])
    reader = JournalReader(path)
    assert [event.step for event in reader.poll() if isinstance(event, StepEvent)] == [1]
    with path.open("a") as file:
        file.write(incomplete[20:] + "\n")
    assert [event.step for event in reader.poll() if isinstance(event, StepEvent)] == [2]
    assert list(reader.poll()) == []


def test_journal_append_after_incomplete_line_starts_new_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(to_line(make_step(1)) + "\n" + to_line(make_step(2))[:30])
    journal = Journal(path)
    journal.append(make_step(3))
    journal.close()
    assert [event.step for event in JournalReader(path).poll() if isinstance(event, StepEvent)] == [1, 3]


def test_journal_append_continues_line_after_partial_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "events.jsonl", os.write
    journal = Journal(path)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    journal.append(make_step(1))
    monkeypatch.undo()
    journal.append(make_step(2))
    journal.close()
    assert [event.step for event in JournalReader(path).poll() if isinstance(event, StepEvent)] == [1, 2]


def test_journal_reader_skips_line_that_is_too_long_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(to_line(make_step(1)) + "\n" + to_line(make_step(2))[:-1])
    os.truncate(path, 4 * MAX_LINE_BYTES)
    with path.open("a") as file:
        file.write("}\n" + to_line(make_step(3)) + "\n")
    reader = JournalReader(path)
    tracemalloc.start()
    steps = [event.step for event in reader.poll() if isinstance(event, StepEvent)]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps == [1, 3]
    assert peak_bytes < 3 * MAX_LINE_BYTES
    assert reader.problem == "events.jsonl is damaged: it has a line of more than 16 MiB"


@pytest.mark.parametrize(
    ("epochs", "best"),
    [
        ([(0.9, 0.8), (0.9, 0.1), (0.9, 0.3)], 2),
        ([(0.9, 0.8), (0.9, 0.1), (0.9, 0.1)], 3),
        ([(0.9, 0.8), (0.9, None)], 1),
        ([(0.8, 0.1), (0.9, 0.8), (None, 0.05)], 2),
    ],
)
def test_best_epoch_is_that_of_lower_loss_then_later_one_of_equal_accuracies(
    epochs: list[tuple[float | None, float | None]], best: int
) -> None:
    events = [
        replace(make_epoch(number), val_accuracy=accuracy, val_loss=loss)
        for number, (accuracy, loss) in enumerate(epochs, 1)
    ]
    record = history_from_events([make_run_started(), *events]).record()
    assert record.values.get("best_epoch") == best
    assert (record.values.get("best_val_accuracy"), record.values.get("best_epoch_val_loss")) == epochs[best - 1]


def append(journal: Path, *events: Event) -> None:
    with journal.open("a") as file:
        file.writelines(to_line(event) + "\n" for event in events)


def read(reader: JournalReader) -> tuple[bool, list[Event]]:
    events = list(reader.poll())
    return reader.was_replaced, events


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    append(path, make_run_started(), make_step(1))
    return path


@pytest.mark.parametrize("is_shorter", [True, False])
def test_follower_starts_over_when_journal_is_replaced(journal: Path, is_shorter: bool) -> None:
    follower = JournalReader(journal)
    read(follower)
    other = journal.with_suffix(".new")
    append(other, *(make_epoch(number, 0.5) for number in range(1, 2 if is_shorter else 20)))
    other.replace(journal)
    was_replaced, events = read(follower)
    assert was_replaced and {type(event) for event in events} == {EpochEvent}
    assert read(follower) == (False, [])


def test_follower_keeps_its_place_while_journal_is_missing(journal: Path) -> None:
    follower = JournalReader(journal)
    read(follower)
    journal.rename(journal.with_suffix(".away"))
    assert read(follower) == (False, []) and follower.problem is None
    journal.with_suffix(".away").rename(journal)
    append(journal, make_step(2))
    assert read(follower) == (False, [make_step(2)])


def test_follower_reports_unreadable_journal_until_it_can_be_read(journal: Path) -> None:
    follower, target = JournalReader(journal), journal.with_suffix(".target")
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
    follower = JournalReader(journal)
    assert len(list(follower.poll(100 * len(line)))) == 100
    assert follower.size - follower.offset == 900 * len(line)
    assert len(list(follower.poll())) == 900
