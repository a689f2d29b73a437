"""`--json`: every object has `format`, one function prints it, and pages list its fields and those of events."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine.base.codec import fields
from engine.runs.events import ConfigRejected, FlushJournal
from engine.runs.folder import RunFolder
from engine.runs.journal import EVENT_TYPES
from support.runs.event_factories import make_run_started, make_step
from support.runs.factories import make_ended_runs
from support.runs.trained_run import call
from tui.cli.console import json_line

JSON_PAGE, EVENTS_PAGE = (Path(__file__).parents[3] / "engine" / name for name in ("JSON.md", "EVENTS.md"))
# Sent to the supervisor, which does not write them to the journal.
UNWRITTEN_EVENTS = (ConfigRejected, FlushJournal)
# Commands that need neither torch nor a GPU; the tests of the others read their output.
LINES = ["runs --json", "compare run-0 run-1 --json", "config digits --json"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return make_ended_runs(tmp_path, 2)[1]


def test_each_line_of_a_stream_has_the_format() -> None:
    for values in (make_run_started(), make_step(3), {"type": "lr_step", "loss": float("nan")}):
        assert json.loads(json_line(values))["format"] == 1
    assert json.loads(json_line({"loss": float("nan")})) == {"format": 1, "loss": None}


@pytest.mark.parametrize("line", LINES)
def test_command_prints_one_object_with_its_format_and_the_fields_of_its_page(run: RunFolder, line: str) -> None:
    printed = json.loads(call(*line.split()).stdout)
    assert next(iter(printed.items())) == ("format", 1)
    assert {*printed} == {"format", *fields_of(JSON_PAGE, f"`gputrain {line.split()[0]} --json`")}


def test_page_has_the_fields_of_a_run(run: RunFolder) -> None:
    [shown, *_] = json.loads(call("runs", "--json").stdout)["runs"]
    assert {*shown} <= fields_of(JSON_PAGE, "`Run`")


def test_page_of_events_has_their_fields() -> None:
    missing = [
        f"{name}.{part.encode_name}"
        for name, kind in EVENT_TYPES.items()
        if kind not in UNWRITTEN_EVENTS
        for part in fields(kind)
        if part.encode_name not in fields_of(EVENTS_PAGE, f"`{name}`") | {"time"}
    ]
    assert missing == []


def fields_of(page: Path, heading: str) -> set[str]:
    """Return the fields in the table below a heading of a page, and those of the part that it extends."""
    section = page.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    other = re.search(r"^Also the fields of (`\w+`)", section, re.MULTILINE)
    return {*re.findall(r"^\| `(\w+)`", section, re.MULTILINE)} | (fields_of(page, other[1]) if other else set())
