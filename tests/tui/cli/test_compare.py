"""`gputrain compare`: tables, JSON, baseline, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.codec import replace
from engine.runs.command_events import CodeChanged, CodeRecorded
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.runs.records import CodeSummary
from support.messages import says
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import append_events, make_run_folder, write_config
from support.runs.trained_run import call


@pytest.fixture
def three_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    for number, (name, lr) in enumerate((("alpha", 0.1), ("beta", 0.1), ("gamma", 0.5))):
        events = [make_run_started(), make_epoch(1, 0.7 + 0.1 * number), RunFinished(time=20.0, state="finished")]
        folder = make_run_folder(tmp_path, name, *events)
        write_config(folder, {"run": {"seed": number}, "optim": {"lr": lr}})
    return tmp_path


def lines_of(text: str) -> dict[str, list[str]]:
    """Map the label of each line to its cells; the first of several tables."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        label, *cells = [part for part in line.split("  ") if part.strip()] or [""]
        lines.setdefault(label.strip(), [cell.strip() for cell in cells])
    return lines


def test_compare_prints_differences_from_the_baseline(three_runs: Path) -> None:
    lines = lines_of(call("compare", "alpha", "gam", "--baseline", "gamma", "--transpose").stdout)
    assert lines["best val acc"] == ["0.7000 (-0.2000)", "0.9000*"]
    assert lines["duration"] == ["20s", "20s"]


def test_compare_prints_a_row_a_run_and_columns_that_do_not_fit_below(
    three_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    runs, _, groups = call("compare", "alpha", "beta", "gamma").stdout.partition("\n\nMean")
    assert "alpha ×2" in groups
    tables = [block.splitlines() for block in runs.split("\n\n")]
    assert len(tables) > 1 and max(len(line) for table in tables for line in table) <= 40
    for table in tables:
        assert [line.split()[0] for line in table[:4]] == ["run", "alpha", "beta", "gamma"]
    assert lines_of(runs)["gamma"][0] == "0.9000*"


def test_compare_notes_other_datasets_on_stderr(three_runs: Path) -> None:
    write_config(RunFolder(three_runs / "beta"), {"data": {"dataset": "fake"}})
    result = call("compare", "alpha", "beta")
    assert "different datasets" in result.stderr
    assert "different datasets" not in result.stdout


def test_compare_refuses_baseline_that_is_not_compared(three_runs: Path) -> None:
    result = call("compare", "alpha", "--baseline", "gamma")
    assert result.exit_code == 2
    assert says(result.stderr, "unknown-value", "error: --baseline: gamma")


def test_code_that_changed_before_the_start_is_marked(three_runs: Path) -> None:
    codes = {"alpha": CodeSummary(commit="a" * 40, is_dirty=False, fingerprint="1")}
    codes["beta"] = CodeSummary(commit="a" * 40, is_dirty=True, fingerprint="f00d1234")
    codes["gamma"] = replace(codes["alpha"], changed="1 file (train.py)")
    for name, code in codes.items():
        folder = RunFolder(three_runs / name)
        changes = [CodeChanged(message=code.changed, files=["train.py"])] if code.changed else []
        append_events(folder, CodeRecorded(code=replace(code, changed=""), changed=[], linked=[]), *changes)
    commit = "a" * 10
    cells = lines_of(call("compare", *codes, "--transpose").stdout)["code"]
    assert cells == [commit, f"{commit}+f00d", f"{commit}, then changed"]
