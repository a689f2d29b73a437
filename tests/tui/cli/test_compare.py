"""`gputrain compare`: tables, JSON, baseline, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.yaml_io import to_yaml
from engine.runs.code_events import CodeChanged, CodeRecorded
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from engine.runs.records import CodeSummary
from engine.utils.codec import replace
from support.messages import says
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder, write_run_record
from support.runs.trained_run import call


@pytest.fixture
def three_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    for number, (name, lr) in enumerate((("alpha", 0.1), ("beta", 0.1), ("gamma", 0.5))):
        events = [make_run_started(), make_epoch(1, 0.7 + 0.1 * number), RunFinished(time=20.0, state="finished")]
        folder = make_run_folder(tmp_path, name, *events)
        folder.config.write_text(to_yaml({"run": {"seed": number}, "optim": {"lr": lr}}))
    return tmp_path


def lines_of(text: str) -> dict[str, list[str]]:
    """Map the label of each line to its cells; the first of several tables."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        label, *cells = [part for part in line.split("  ") if part.strip()] or [""]
        lines.setdefault(label.strip(), [cell.strip() for cell in cells])
    return lines


def test_compare_prints_differing_keys_and_figures(three_runs: Path) -> None:
    result = call("compare", "alpha", "gamma")
    lines = lines_of(result.stdout)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert lines["optim.lr"] == ["0.1", "0.5"]
    assert lines["run.seed"] == ["0", "2"]
    assert lines["best val acc"] == ["0.7000", "0.9000*"]
    assert not any(label.startswith(("optim.", "run.")) for label in lines.keys() - {"optim.lr", "run.seed"})


def test_compare_prints_differences_from_the_baseline(three_runs: Path) -> None:
    lines = lines_of(call("compare", "alpha", "gam", "--baseline", "gamma").stdout)
    assert lines["best val acc"] == ["0.7000 (-0.2000)", "0.9000*"]
    assert lines["duration"] == ["20s", "20s"]


def test_compare_summarizes_runs_that_differ_in_the_seed(three_runs: Path) -> None:
    text = call("compare", "alpha", "beta", "gamma").stdout
    assert "alpha ×2" in text
    assert "0.7500 ±0.0707" in text


def test_compare_prints_json(three_runs: Path) -> None:
    values = json.loads(call("compare", "alpha", "beta", "--json", "--baseline", "alpha").stdout)
    assert [run["name"] for run in values["runs"]] == ["alpha", "beta"]
    assert values["config"] == {"run.seed": [0, 1]}
    assert values["baseline"] == "alpha"


def test_compare_takes_a_run_once_and_one_run_alone(three_runs: Path) -> None:
    result = call("compare", "alpha", three_runs / "alpha")
    assert result.exit_code == 0
    assert lines_of(result.stdout)["best val acc"] == ["0.7000"]


def test_compare_puts_columns_that_do_not_fit_below(three_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = call("compare", "alpha", "beta", "gamma").stdout
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 40
    assert text.count("best val acc") == 3


def test_compare_notes_other_datasets_on_stderr(three_runs: Path) -> None:
    (three_runs / "beta/config.yaml").write_text("data: {dataset: fake}")
    result = call("compare", "alpha", "beta")
    assert "different datasets" in result.stderr
    assert "different datasets" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (("alpha", "nothing"), "unknown-run", "nothing"),
        (("alpha", "--screen"), "unknown-option", "gputrain attach RUN RUN"),
        (("alpha", "--baseline", "gamma"), "unknown-value", "error: --baseline: gamma"),
    ],
)
def test_compare_refuses(three_runs: Path, arguments: tuple[str, ...], code: str, value: str) -> None:
    result = call("compare", *arguments)
    assert result.exit_code == 2
    assert says(result.stderr, code, value)


def test_compare_limits_the_number_of_runs(three_runs: Path) -> None:
    for number in range(17):
        make_run_folder(three_runs, f"more-{number}", make_run_started())
    result = call("compare", *(f"more-{number}" for number in range(17)))
    assert result.exit_code == 2
    assert says(result.stderr, "too-many", "error: compare: ", "16", "17")


def test_compare_shows_names_and_values_without_control_characters(three_runs: Path) -> None:
    (three_runs / "beta/config.yaml").write_text(to_yaml({"model": {"name": "\x1b[31m[bold]x"}}))
    text = call("compare", "alpha", "beta").stdout
    assert "\x1b" not in text
    assert "[bold]x" in text


def test_code_that_changed_before_the_start_is_marked(three_runs: Path) -> None:
    codes = {"alpha": CodeSummary(commit="a" * 40, is_dirty=False, fingerprint="1")}
    codes["beta"] = CodeSummary(commit="a" * 40, is_dirty=True, fingerprint="f00d1234")
    codes["gamma"] = replace(codes["alpha"], changed="1 file (train.py)")
    for name, code in codes.items():
        folder = RunFolder(three_runs / name)
        events = [CodeRecorded(code=replace(code, changed=""), changed=[], linked=[])]
        changes = [CodeChanged(message=code.changed, files=["train.py"])] if code.changed else []
        with folder.journal.open("a") as journal:
            journal.writelines(to_line(event) + "\n" for event in (*events, *changes))
        write_run_record(folder)
    commit = "a" * 10
    cells = lines_of(call("compare", *codes).stdout)["code"]
    assert cells == [commit, f"{commit}+f00d", f"{commit}, then changed"]
