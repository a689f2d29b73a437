"""Control requests through the run folder: all ranks handle them at the same step, the journal records them, and the
training result does not change."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from engine.runs.control import send_request
from engine.runs.folder import RunFolder, RunState
from support.gputrain_command import Gputrain, read_events, wait_for, without_timings
from support.messages import says

RUN = ["run", "--headless", "digits", "--model", "linear", "--ranks", "2", "run.log_every=7"]


@pytest.mark.nightly
def test_control_requests_pause_checkpoint_and_continue_without_changing_results(gputrain: Gputrain) -> None:
    plain = gputrain.start(*RUN, "--name", "plain", "--epochs", "4")
    # The first step after the epoch whose event asks for the pause.
    gputrain.inject_fault("wait for a pause", 1, 23)
    gputrain.start(*RUN, "--name", "controlled", "--epochs", "4")
    folder = RunFolder(gputrain.runs / "controlled")
    gputrain.wait_for_event("controlled", "epoch", 1)
    send_request(folder.control, "pause")
    gputrain.wait_for_event("controlled", "paused")
    assert folder.state(folder.history().state) is RunState.PAUSED

    send_request(folder.control, "checkpoint")
    paused = next(event for event in read_events(folder.path) if event["type"] == "paused")
    assert paused["step"] < 4 * 22
    # That of the epoch may be written after the pause.
    checkpoint = {"type": "checkpoint", "step": paused["step"]}
    wait_for(lambda: checkpoint.items() <= read_events(folder.path)[-1].items(), "a checkpoint of the paused run")

    send_request(folder.control, "continue")
    gputrain.wait_for_event("controlled", "run_finished")
    assert plain.wait(60) == 0
    events = read_events(folder.path)
    assert next(event for event in events if event["type"] == "continued")["step"] == paused["step"]
    assert [event["outcome"] for event in events if event["type"] == "control"] == ["at the next step"] * 2 + [
        "immediately"
    ]
    assert without_timings(events) == without_timings(read_events(gputrain.runs / "plain"))


@pytest.mark.nightly
def test_run_whose_folder_is_moved_ends_and_resumes_there_and_leaves_the_next_run_alone(gputrain: Gputrain) -> None:
    next_run = gputrain(*RUN, "--name", "next", "--epochs", "1")
    assert next_run.returncode == 0, next_run.stderr
    run = gputrain.start(*RUN, "--name", "a", "--epochs", "100000", stderr=subprocess.PIPE)
    gputrain.wait_for_event("a", "checkpoint")
    (gputrain.runs / "a").rename(gputrain.runs / "moved")
    (gputrain.runs / "next").rename(gputrain.runs / "a")
    files = contents(gputrain.runs / "a")
    assert run.wait(60) == 1
    assert run.stderr is not None
    assert [says(line, "run-deleted", gputrain.runs / "a") for line in run.stderr if line.startswith("failed: ")] == [
        True
    ]
    assert contents(gputrain.runs / "a") == files
    resumed = gputrain.start("resume", "moved", "--headless")
    gputrain.wait_for_event("moved", "run_resumed")
    assert gputrain("stop", "moved").returncode == 0
    assert resumed.wait(60) == 3
    assert contents(gputrain.runs / "a") == files
    assert read_events(gputrain.runs / "moved")[-1]["state"] == "stopped"
    assert (gputrain.runs / "moved" / "checkpoints" / "last.pt").exists()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.nightly
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_run_whose_folder_is_deleted_ends_with_one_sentence(gputrain: Gputrain, start_method: str) -> None:
    options = ("--epochs", "100000", f"device.start_method={start_method}")
    run = gputrain.start(*RUN, "--name", "a", *options, stderr=subprocess.PIPE)
    gputrain.wait_for_event("a", "epoch")
    # As `rm -r` would, which the run may hinder by writing another file.
    while (gputrain.runs / "a").exists():
        shutil.rmtree(gputrain.runs / "a", ignore_errors=True)
    assert run.wait(60) == 1
    assert run.stderr is not None
    reports = [line for line in run.stderr.read().splitlines() if line.startswith("failed: ")]
    assert len(reports) == 1
    assert says(reports[0], "run-deleted", gputrain.runs / "a")
    assert not (gputrain.runs / "a").exists()
