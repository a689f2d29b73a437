"""Messages about a run: their texts come from its record, and their length is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.notify.message import (
    MAX_LINE_CHARS,
    MAX_LINES,
    MAX_TITLE_CHARS,
    make_end_message,
    make_message,
    stall_sentence,
)
from engine.runs.folder import RunState
from engine.runs.records import Bottleneck, BottleneckKind
from engine.runs.run_record import RunRecord
from support.replace import replace
from support.runs.factories import make_record

RECORD = make_record(
    state=RunState.STOPPED,
    epochs=2,
    total_epochs=3,
    best_val_accuracy=0.75,
    bottleneck=Bottleneck(kind=BottleneckKind.DATA, message="disk"),
    seconds=65.0,
)


def body_lines(occasion: str, *, resumable: bool = True, record: RunRecord = RECORD) -> list[str]:
    return make_message(occasion, "sentence", "h", Path("/r/a"), record, resumable=resumable).body.splitlines()  # type: ignore[arg-type]


def test_message_has_progress_and_best_accuracy_unless_its_sentence_has_it() -> None:
    stopped, finished = body_lines("stopped")[2], body_lines("finished")[2]
    assert [part for part in ("2 of 3", "1m05s", "0.7500") if part not in stopped] == []
    assert "2 of 3" in finished and "0.7500" not in finished


@pytest.mark.parametrize(
    ("occasion", "command"),
    [("finished", "attach"), ("crashed", "resume"), ("stalled", "attach")],
)
def test_message_ends_with_command_to_resume_only_after_an_early_end(occasion: str, command: str) -> None:
    assert body_lines(occasion)[-1] == f"gputrain {command} a --runs-dir /r"
    assert body_lines(occasion, resumable=False)[-1] == "gputrain attach a --runs-dir /r"


def test_end_message_has_level_of_occasion_and_last_lines() -> None:
    lines = [str(number) for number in range(MAX_LINES + 2)]
    message = make_end_message("failed", "sweep-1", "host", lines)
    assert (message.occasion, message.level) == ("failed", "failure")
    assert message.title.startswith("sweep-1 ") and message.title.endswith(" host")
    assert message.body.splitlines() == lines[2:]


def test_message_lines_are_cut_only_above_their_limit() -> None:
    message = make_end_message(
        "finished", "n" * MAX_TITLE_CHARS, "h", ["x" * MAX_LINE_CHARS, "y" * (MAX_LINE_CHARS + 1)]
    )
    assert len(message.title) == MAX_TITLE_CHARS
    assert message.body.splitlines() == ["x" * MAX_LINE_CHARS, "y" * (MAX_LINE_CHARS - 1) + "…"]


def test_stall_sentence_names_phase_and_only_a_watchdog_still_to_come() -> None:
    record = replace(RECORD, values=RECORD.values | {"step": 1234}, current_epoch=2, phase="validating")
    sentence = stall_sentence(record, 300.0, 600.0)
    assert [part for part in ("5m00s", "1,234", "validating", "10m00s", "run.watchdog") if part not in sentence] == []
    assert "run.watchdog" not in stall_sentence(record, 300.0, 300.0)
