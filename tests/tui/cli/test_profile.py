"""`gputrain runs profile`: what it prints, and what it says if there is no profile to take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner, Result

from engine.runs.control import consume_requests
from engine.runs.events import Profiled, RunFinished, RunPaused
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from support.gputrain_command import wait_for
from support.messages import says
from support.runs.event_factories import make_run_started
from support.runs.factories import append_events, make_run_folder
from support.runs.profiles import FAST_RANK, SLOW_RANK, make_profile, make_rank_profile, store_profile
from tui.cli.main import app

PROFILE = make_profile(make_rank_profile(0, FAST_RANK), make_rank_profile(1, SLOW_RANK))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return make_run_folder(tmp_path, "a", make_run_started())


@pytest.fixture
def live_run(run: RunFolder) -> Iterator[RunFolder]:
    ownership = Ownership(run)
    yield run
    ownership.release()


def profile(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["runs", "profile", "a", *arguments])


def answer_request(run: RunFolder, answer: Profiled) -> Thread:
    """Answer the next request in a thread, as the owner of the run does."""

    def wait_and_answer() -> None:
        wait_for(lambda: run.control.exists() and any(consume_requests(run.control)), "a request", 20)
        append_events(run, answer)

    thread = Thread(target=wait_and_answer)
    thread.start()
    return thread


def test_profile_of_a_paused_run_is_awaited_and_printed_as_bars(live_run: RunFolder) -> None:
    append_events(live_run, RunPaused(step=5, epoch=1))
    name = store_profile(live_run, PROFILE)
    thread = answer_request(live_run, Profiled(step=120, epoch=3, steps=4, folder=f"profile/{name}"))
    result = profile()
    thread.join()
    assert result.exit_code == 0, result.output
    assert "a is paused; the profile begins when it continues." in result.stderr
    assert "CPU-bound: backward takes 57% of the step" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines() if "█" in line] == ["rank", "rank", "░"]
    assert f"{live_run.path}/profile/{name}/rank-0.json.gz" in result.stdout


def test_run_that_does_not_answer_is_not_waited_for_without_end(
    live_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.cli.run_control.MAX_WAIT_SECONDS", 0)
    result = profile()
    assert result.exit_code == 1
    assert says(result.output, "timed-out", " a ", "--stored")


def test_run_that_has_ended_is_not_asked(run: RunFolder) -> None:
    append_events(run, RunFinished(state="finished"))
    result = profile()
    assert result.exit_code == 1
    assert says(result.output, "not-running", "error: a ", "finished", "--stored")
    assert not run.control.exists()
