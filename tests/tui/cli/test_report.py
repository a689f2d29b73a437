"""`gputrain report`, and its page in a browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.messages import says
from support.runs.compared_runs import make_compared_run
from tui.cli.main import app


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_report_and_plot_write_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_compared_run(tmp_path / "runs", "a")
    assert json.loads(invoke("report", "a", "--json"))["file"] == "report.html"
    assert "<!DOCTYPE html>" in (tmp_path / "report.html").read_text()
    assert invoke("report", "a", "--metric", "lr", "-o", "lr.svg").strip() == "lr.svg"
    assert invoke("report", "a", "--metric", "loss", "-o", "lr.svg").strip() == "lr.svg"
    (tmp_path / "lr.svg").write_text("own drawing")
    assert says(invoke("report", "a", "-o", "lr.svg", code=2), "name-in-use", "error: --output: lr.svg ", "--force")


def test_report_is_written_among_watched_runs_only_if_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    (logs / "one").mkdir(parents=True)
    (logs / "one" / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.25\n")
    monkeypatch.chdir(logs)
    assert says(invoke("report", ".", code=2), "not-supported", "belongs to another program", str(logs))
    assert [path.name for path in logs.iterdir()] == ["one"]
    invoke("report", ".", "-o", "../report.html")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "location", "value"),
    [
        (["--x", "step"], "no-effect", "--x", "the page report.html"),
        (["--log", "-o", "a.HTM"], "no-effect", "--log", "a.HTM"),
        (["-o", "curves.jpg"], "wrong-format", "-o", ".html"),
        (["--x", "epochs", "-o", "a.pdf"], "unknown-value", "--x", "did you mean epoch?"),
    ],
)
def test_suffix_decides_which_options_a_report_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: str, location: str, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_compared_run(tmp_path / "runs", "a")
    refusal = invoke("report", "a", *arguments, code=2)
    assert refusal.startswith(f"error: {location}: ") and refusal.count("\n") == 1
    assert says(refusal, code, value)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
