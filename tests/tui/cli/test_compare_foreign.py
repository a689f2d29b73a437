"""`gputrain compare` and `report` of runs that other programs have recorded, and the commands that refuse them."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.foreign.folders import find_runs
from engine.runs.events import RunFinished
from support.messages import says
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.runs.trained_run import call
from tui.cli import console
from tui.cli.console import reading_line

RECORDED = Path(__file__).parents[2] / "recordings" / "foreign"
KERAS, LIGHTNING, TIMM = RECORDED / "keras", RECORDED / "lightning", RECORDED / "timm"
HOSTILE = '</svg><script>alert(1)</script>" onload="x $a_b$ [red]\x1b[31m'


@pytest.fixture(autouse=True)
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUTRAIN_RUNS", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path / "runs"


def make_log(folder: Path, name: str = "loss", values: tuple[float, ...] = (0.5, 0.25), **parameters: object) -> Path:
    """Write the logs of a run with one metric, one value a step, and its parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"step": step, name: value}) + "\n" for step, value in enumerate(values, 1))
    (folder / "metrics.jsonl").write_text("".join(rows))
    (folder / "hparams.yaml").write_text(json.dumps(parameters))
    return folder


def compared(*arguments: object) -> dict[str, Any]:
    result = call("compare", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def figures(run: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in run["figures"].items() if value is not None}


def test_compare_has_last_and_best_values_of_the_logs() -> None:
    rows = list(csv.DictReader((KERAS / "history.csv").open(), delimiter=";"))
    keras, timm = compared(KERAS, TIMM)["runs"]
    assert (keras["name"], keras["formats"], timm["name"]) == ("keras", ["csv"], "timm")
    assert figures(keras) == {
        "train_loss": float(rows[-1]["loss"]),
        "val_loss": float(rows[-1]["val_loss"]),
        "best_val_loss": min(float(row["val_loss"]) for row in rows),
        "step": int(rows[-1]["epoch"]),
    }
    # timm's accuracies are percent.
    assert "val_accuracy" not in figures(timm) and figures(timm)["metrics.eval_top1"] == 20.0


def test_compare_takes_all_runs_below_a_path_and_shows_the_parameters_that_differ(tmp_path: Path) -> None:
    for name, parameters in (("a", {"lr": 0.1, "size": 3}), ("b", {"lr": 0.2, "size": 3}), ("c", {"lr": 0.2})):
        make_log(tmp_path / "logs" / name, **parameters)
    values = compared("logs")
    assert [run["name"] for run in values["runs"]] == ["a", "b", "c"]
    assert values["config"] == {"lr": [0.1, 0.2, 0.2], "size": [3, 3, None]}
    text = call("compare", "logs").stdout
    assert [line.split() for line in text.splitlines() if line.startswith("size")] == [["size", "3", "3", "–"]]


def test_compare_of_own_and_foreign_run_shares_metrics_of_the_same_meaning(tmp_path: Path, runs_folder: Path) -> None:
    make_run_folder(runs_folder, "own", make_run_started(), make_epoch(1, 0.7), RunFinished(time=20, state="finished"))
    make_log(tmp_path / "other", "val/loss", (0.5, 0.25, 0.3), model="x")
    values = compared("own", "./other", "--baseline", "other")
    own, other = values["runs"]
    assert figures(other) == {"val_loss": 0.3, "best_val_loss": 0.25, "step": 3}
    assert own["difference"]["best_val_loss"] == own["figures"]["best_val_loss"] - 0.25
    assert values["config"] == {} and values["baseline"] == "other"


def test_compare_says_which_values_are_better_only_if_the_name_tells(tmp_path: Path) -> None:
    for name, values in (("a", (1.0, 2.0)), ("b", (3.0, 4.0))):
        make_log(tmp_path / name, "perplexity", values)
        row = json.dumps({"step": 1, "samples": values[0], "f1": values[0]})
        (tmp_path / name / "more.jsonl").write_text(f"{row}\n")
    best = compared("a", "b")["best"]
    assert best["metrics.perplexity"] == [0] and best["metrics.f1"] == [1]
    assert not best.get("metrics.samples")


def test_compare_gives_runs_of_the_same_name_more_of_their_path(tmp_path: Path) -> None:
    for name in ("x/version_0", "y/version_0"):
        make_log(tmp_path / name)
    runs = compared("x/version_0", "y/version_0", "x")["runs"]
    assert [run["name"] for run in runs] == ["x/version_0", "y/version_0"]


def test_name_of_own_run_comes_before_a_path_and_its_beginning_is_ambiguous(tmp_path: Path, runs_folder: Path) -> None:
    make_run_folder(runs_folder, "logs", make_run_started())
    make_log(tmp_path / "logs")
    assert "formats" not in compared("logs")["runs"][0]
    assert compared("./logs")["runs"][0]["formats"] == ["json"]
    make_run_folder(runs_folder, "tb-1", make_run_started())
    make_log(tmp_path / "tb")
    result = call("compare", "tb")
    assert result.exit_code == 2 and says(result.stderr, "ambiguous-name", "tb-1", "./tb")
    # A command that takes runs of gputrain only has no second meaning.
    assert call("runs", "show", "tb").exit_code == 0


@pytest.mark.parametrize(
    "command",
    [
        ("logs", "other"),
        ("stop", "other"),
        ("resume", "other"),
        ("evaluate", "other"),
        ("export", "other"),
        ("runs", "delete", "other", "--yes"),
        ("runs", "rename", "other", "new"),
        ("attach", "other"),
    ],
)
def test_command_on_own_runs_refuses_foreign_run_in_one_sentence(
    tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.cli.terminal.require_terminal", lambda *_: None)
    make_log(tmp_path / "other")
    before = sorted(path.name for path in (tmp_path / "other").iterdir())
    result = call(*command)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert says(result.stderr, "recorded-elsewhere", "error: other: ", "gputrain watch other")
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == before


@pytest.mark.parametrize("command", ["logs", "stop", "compare", "watch"])
def test_name_that_is_longer_than_any_file_is_refused_in_one_sentence(command: str) -> None:
    result = call(command, "a" * 300)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["compare", "report", "runs show"])
def test_path_that_does_not_exist_is_named_as_such(command: str, tmp_path: Path) -> None:
    path = tmp_path / "missing"
    result = call(*command.split(), path)
    assert result.exit_code == 2 and says(result.stderr, "not-found", f"error: {path}: there is no such path")
    if command != "runs show":
        result = call(command, "missing")
        assert result.exit_code == 2 and result.stderr.startswith(
            "error: missing: is no path, and there are no runs in"
        )


def test_compare_shows_hostile_names_as_text(tmp_path: Path) -> None:
    make_log(tmp_path / "a", HOSTILE, **{HOSTILE: HOSTILE})
    make_log(tmp_path / "b", HOSTILE)
    text = call("compare", "a", "b").stdout
    assert "\x1b" not in text and r"\x1b[31m" in text


def test_report_of_one_run_has_its_charts_and_parameters_and_nothing_of_a_trained_model() -> None:
    assert call("report", LIGHTNING / "csv").exit_code == 0
    page = Path("report.html").read_text()
    assert page.count('<svg class="chart"') == 1 and 'aria-label="loss over the steps"' in page
    assert "<h2>Parameters</h2>" in page and "<td>tiny</td>" in page
    assert "Confusion" not in page and "<h2>Classes</h2>" not in page and "Repeat this run" not in page


def test_report_of_several_runs_has_a_chart_of_each_metric() -> None:
    result = call("report", KERAS, TIMM, LIGHTNING / "tb", "--json")
    assert json.loads(result.stdout)["runs"] == ["keras", "timm", "tb"]
    page = Path("report.html").read_text()
    for title in ("train loss", "val loss", "lr", "eval_top1", "hp_metric"):
        assert f"<h3>{title}</h3>" in page
    assert "<h2>Differences of the parameters</h2>" in page


def test_report_shows_hostile_names_and_values_as_text(tmp_path: Path) -> None:
    make_log(tmp_path / "a", HOSTILE, (1e308, -1e308, 0.5), **{HOSTILE: HOSTILE})
    make_log(tmp_path / "b", "_hidden" + HOSTILE)
    for arguments in (("a",), ("a", "b")):
        assert call("report", *arguments, "--force").exit_code == 0
        page = Path("report.html").read_text()
        assert "<script" not in page and 'onload="x' not in page and "\x1b" not in page
        assert "&lt;script&gt;" in page


def test_report_draws_a_figure_of_the_metrics_by_their_names_in_the_log(tmp_path: Path) -> None:
    make_log(tmp_path / "a", "eval/loss")
    make_log(tmp_path / "b", "throughput")
    assert call("report", "a", "--metric", "eval/loss", "-o", "loss.svg").exit_code == 0
    assert ">val loss<" in Path("loss.svg").read_text() and ">Step<" in Path("loss.svg").read_text()
    assert call("report", "b", "-o", "default.svg").exit_code == 0
    assert ">throughput<" in Path("default.svg").read_text()
    result = call("report", "a", "--x", "hours", "-o", "time.svg")
    assert result.exit_code == 2 and says(result.stderr, "not-recorded", "--x", "use step")


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_reading_of_large_runs_is_shown_on_a_terminal_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalText()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(console, "PATIENCE_SECONDS", 0.0)
    runs = find_runs(LIGHTNING).runs
    with reading_line(runs) as on_read:
        on_read(runs[1], 0.25)
        on_read(runs[1], 0.26)
        assert terminal.getvalue() == "\r\x1b[KReading run 2 of 2, 25%: tb"
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_reading_of_small_runs_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalText()
    monkeypatch.setattr(sys, "stderr", terminal)
    runs = find_runs(LIGHTNING).runs
    with reading_line(runs) as on_read:
        on_read(runs[0], 0.25)
        assert terminal.getvalue() == ""


def test_interrupted_reading_says_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    runs = find_runs(LIGHTNING).runs
    with pytest.raises(KeyboardInterrupt), reading_line(runs) as on_read:
        on_read(runs[0], 0.5)
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "Stopped while reading csv.\n"
