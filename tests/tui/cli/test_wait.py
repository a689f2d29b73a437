"""`gputrain wait`: what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.runs.events import RankFailed, RunFinished
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import append_events, make_run_folder
from support.runs.trained_run import call


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    return tmp_path


def ended(root: Path, name: str, state: str = "finished", message: str = "done") -> RunFolder:
    epoch = replace(make_epoch(1), metrics={"f1": 0.5})
    return make_run_folder(root, name, make_run_started(), epoch, RunFinished(state=state, message=message))


def test_condition_ends_the_wait_for_a_run_that_goes_on(root: Path) -> None:
    run = make_run_folder(root, "a", make_run_started())
    ownership = Ownership(run)
    append_events(run, replace(make_epoch(1), metrics={"f1": 0.95}))
    result = call("wait", "a", "--until", "f1>=90%", "--json")
    [found] = json.loads(result.stdout)["runs"]
    assert (result.exit_code, found["result"], found["state"]) == (0, "met", "running")
    assert found["figures"]["metrics.f1"] == 0.95
    # The keys of figures are those of conditions, columns and --sort.
    assert call("wait", "a", "--until", "metrics.f1>=90%").exit_code == 0
    [row] = json.loads(call("runs", "--columns", "f1", "--sort", "metrics.f1", "--json").stdout)["runs"]
    assert row["columns"] == {"metrics.f1": 0.95}
    ownership.release()


def test_condition_that_is_never_met_is_a_failure(root: Path) -> None:
    ended(root, "a")
    result = call("wait", "a", "--until", "reward>1")
    assert result.exit_code == 1
    assert result.stdout == "a unmet: finished without reward>1: reward is unknown\n"
    assert result.stderr.startswith("warning: --until: no run has reward yet")


def test_json_explains_a_failure_and_text_escapes_it(root: Path) -> None:
    run = make_run_folder(root, "a", make_run_started())
    failure = RankFailed(rank=1, device="cpu", cause="killed \x1b[2J", code="process-killed", traceback="a\n\x1b[2Jb\n")
    append_events(run, failure, RunFinished(state="failed", message="rank 1 failed"))
    assert call("wait", "a").stdout == "a failed: killed \\x1b[2J\n"
    [found] = json.loads(call("wait", "a", "--json").stdout)["runs"]
    lines = ["a", "\\x1b[2Jb"]
    assert found["failure"] == {"cause": "killed \x1b[2J", "code": "process-killed", "rank": 1, "lines": lines}


@pytest.mark.parametrize(
    ("arguments", "location"),
    [
        (["--timeout", "soon"], "--timeout: "),
        (["--until", "f1 >"], "--until: "),
        (["--until", "f1>high"], "metrics.f1: "),
    ],
)
def test_invalid_option_is_refused_at_once(root: Path, arguments: list[str], location: str) -> None:
    ended(root, "a")
    result = call("wait", "a", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {location}") and result.stderr.count("\n") == 1
