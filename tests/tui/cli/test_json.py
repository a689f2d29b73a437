"""`--json`: every object has `format`, one function prints it, and two pages list its fields and those of events."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from engine.queue.listing import QueueRow
from engine.runs.folder import RunFolder
from engine.sweeps.status import TrialRow
from engine.utils.codec import Record, to_builtins
from support.record_pages import (
    EVENTS_PAGE,
    JSON_PAGE,
    class_tree,
    field_documents,
    make_events_page,
    make_json_page,
)
from support.runs.event_factories import make_run_started, make_step
from support.runs.factories import make_ended_runs, row_of
from support.runs.trained_run import call
from tui.cli.outputs import CompareOutput, QueueOutput, RunsOutput, SweepOutput, SyncOutput, TrashOutput, json_line
from tui.cli.tree import COMMANDS

CLI = Path(__file__).parents[3] / "tui" / "cli"
# Commands that need neither torch nor a GPU; the tests of the others read their output.
LINES = [
    "runs --json", "runs show run-1 --json", "runs trash --json", "compare run-0 run-1 --json", "queue --json",
    "watch . --json", "config digits --json", "config digits --sources --json", "config describe optim --json",
    "wait run-1 --json",
]  # fmt: skip


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


def test_list_prints_the_record_of_a_row(run: RunFolder) -> None:
    values = to_builtins(RunsOutput(runs=[row_of(run).values()]))["runs"][0]
    [listed] = json.loads(call("runs", "--json", "run-1").stdout)["runs"]
    assert [*values] == [*listed] and "format" not in listed


def test_pages_of_fields_are_those_of_the_records() -> None:
    hint = "if this is intended: python tests/support/record_pages.py"
    assert make_json_page() == JSON_PAGE.read_text(), hint
    assert make_events_page() == EVENTS_PAGE.read_text(), hint


def described(kind: type[Record], field: str) -> set[str]:
    """Return the names in the description of a field whose value has no record of its own."""
    return set(re.findall(r"`(\w+)`", field_documents(class_tree(kind))[field]))


@pytest.mark.parametrize(
    ("kind", "field", "printed"),
    [
        (QueueOutput, "queue", {*(each.name for each in fields(QueueRow)), "waited_s"} - {"key", "position"}),
        (SweepOutput, "trials", {each.name for each in fields(TrialRow)}),
    ],
)
def test_description_names_each_field(kind: type[Record], field: str, printed: set[str]) -> None:
    assert described(kind, field) == printed


def test_description_names_each_field_of_runs_in_trash_and_comparison(run: RunFolder) -> None:
    [compared, _] = json.loads(call("compare", "run-0", "run-1", "--json").stdout)["runs"]
    call("runs", "delete", "run-0", "--yes")
    [trashed] = json.loads(call("runs", "trash", "--json").stdout)["runs"]
    assert trashed.keys() == described(TrashOutput, "runs")
    assert compared.keys() <= described(CompareOutput, "runs")


def test_description_names_each_field_of_a_sync() -> None:
    tree = ast.parse((CLI / "sync.py").read_text())
    [function] = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "to_json")
    keys = {
        key.value
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    assert described(SyncOutput, "syncs") == keys


def test_page_names_each_command_with_the_option() -> None:
    defaults = {"runs list": "runs", "queue list": "queue", "config show": "config", "data show": "data"}
    sources = {name: (CLI / f"{entry.target.partition(':')[0]}.py").read_text() for name, entry in COMMANDS.items()}
    tables = {name: f"def {entry.target.partition(':')[2]}(" for name, entry in COMMANDS.items()}
    page = JSON_PAGE.read_text()
    for name, source in sources.items():
        signature = source.partition(tables[name])[2].partition(") -> None:")[0]
        if "JsonOption" in signature:
            short = defaults.get(name, name.removesuffix(" list") if name == "models list" else name)
            assert f"gputrain {short} " in page, name


def test_one_function_prints_json() -> None:
    """Modules of commands neither import `json` nor encode what they print, but for values in texts and in files."""
    users = {
        path.name
        for path in CLI.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(name.name == "json" for name in node.names))
        or (isinstance(node, ast.Name) and node.id in ("encode_indented", "to_line"))
    }
    assert users == {"config.py", "outputs.py"}
