"""`--json`: every object has `format`, one function prints it, and two pages list its fields and those of events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.runs.folder import RunFolder
from support.record_pages import (
    EVENTS_PAGE,
    JSON_PAGE,
    make_events_page,
    make_json_page,
)
from support.runs.event_factories import make_run_started, make_step
from support.runs.factories import make_ended_runs
from support.runs.trained_run import call
from tui.cli.outputs import json_line

# Commands that need neither torch nor a GPU; the tests of the others read their output.
LINES = ["runs --json", "compare run-0 run-1 --json", "config digits --json"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return make_ended_runs(tmp_path, 2)[1]


@pytest.mark.parametrize("line", LINES)
def test_command_prints_one_object_that_begins_with_its_format(run: RunFolder, line: str) -> None:
    printed = json.loads(call(*line.split()).stdout)
    assert next(iter(printed.items())) == ("format", 1)


def test_each_line_of_a_stream_has_the_format() -> None:
    for values in (make_run_started(), make_step(3), {"type": "lr_step", "loss": float("nan")}):
        assert json.loads(json_line(values))["format"] == 1
    assert json.loads(json_line({"loss": float("nan")})) == {"format": 1, "loss": None}


def test_pages_of_fields_are_those_of_the_records() -> None:
    hint = "if this is intended: python tests/support/record_pages.py"
    assert make_json_page() == JSON_PAGE.read_text(), hint
    assert make_events_page() == EVENTS_PAGE.read_text(), hint
