"""Fault injection in real processes: which rank the message names, what is kept, and what remains.

The table in tests/README.md lists all faults.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from engine.config.loader import resolve_config
from engine.jobs.launch.phases import claim
from engine.jobs.launch.request import RunRequest
from engine.jobs.launch.supervise import requeue_clause
from engine.train.distributed.watchdog import Heartbeat, Phase, lagging_ranks
from engine.train.loop.checkpoint import load_newest
from engine.train.loop.log import SkippedSteps
from support.gputrain_command import Gputrain, find_rank_pids, read_events, read_failures, wait_for
from support.messages import says
from support.runs.event_factories import make_run_started
from support.runs.factories import make_run_folder
from support.runs.run_owner import Owner

RUN = ["run", "--headless", "digits", "--model", "linear", "--ranks", "2", "run.log_every=5", "--name", "a"]


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1]


def tracebacks(gputrain: Gputrain) -> int:
    return (gputrain.runs / "a" / "log.txt").read_text().count("Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        pytest.param("hang", "its traceback is in the log", marks=pytest.mark.nightly),
        pytest.param("freeze", "(SIGSTOP)", marks=pytest.mark.soak),
    ],
)
def test_watchdog_names_rank_without_progress(gputrain: Gputrain, kind: str, state: str) -> None:
    gputrain.inject_fault(kind, 1, 12)
    done = gputrain(*RUN, "run.watchdog=2")
    assert done.returncode == 1
    assert read_failures(gputrain.runs / "a") == [(1, "rank-hung")]
    assert all(value in last_line(done) for value in ("rank 1 (cpu) ", " 2 s (run.watchdog)", " 11 steps ", state))
    if kind == "hang":
        assert "in trigger" in (gputrain.runs / "a" / "log.txt").read_text()


@pytest.mark.nightly
def test_hung_rank_is_named_without_watchdog_if_collective_times_out(gputrain: Gputrain) -> None:
    gputrain.inject_fault("hang", 1, 12)
    done = gputrain(*RUN, "run.watchdog=0", "device.timeout=3")
    assert (1, "rank-hung") in read_failures(gputrain.runs / "a")
    assert "rank 1 (cpu) failed: a collective timed out" in last_line(done)
    assert "run.watchdog" not in last_line(done)
    assert "in trigger" in (gputrain.runs / "a" / "log.txt").read_text()


def test_lagging_ranks_returns_ranks_with_least_progress() -> None:
    heartbeats = {0: Heartbeat(7, 2, Phase.BACKWARD), 2: Heartbeat(7, 1, Phase.FORWARD)}
    assert lagging_ranks(heartbeats) == [2]
    assert lagging_ranks({0: heartbeats[0], 1: heartbeats[0]}) == [0, 1]


def test_killed_rank_is_named_and_all_processes_exit(gputrain: Gputrain) -> None:
    checkpoint_options = ["checkpoint.every_minutes=0.002", "checkpoint.every_epochs=100000"]
    process = gputrain.start(*RUN, "--epochs", "100000", "data.pipeline=stream", "--workers", "1", *checkpoint_options)
    gputrain.wait_for_event("a", "checkpoint", 8)
    os.kill(find_rank_pids(process, gputrain)[1], signal.SIGKILL)
    _, messages = process.communicate(timeout=60)
    wait_for(lambda: not gputrain.processes(), "the end of all processes")
    assert read_failures(gputrain.runs / "a") == [(1, "process-killed")]
    assert "rank 1 (cpu) " in messages.splitlines()[-1] and "SIGKILL" in messages.splitlines()[-1]
    saved = [event["step"] for event in read_events(gputrain.runs / "a") if event["type"] == "checkpoint"]
    assert any(step % 22 for step in saved), "checkpoint.every_minutes saves within an epoch"


def test_nonfinite_steps_on_one_rank_are_skipped_on_all_ranks_up_to_limit(gputrain: Gputrain) -> None:
    # BatchNorm updates its running statistics in the forward pass, before the loss is known to be NaN.
    gputrain.inject_fault("nan", 1, 1, 12, 13, 30, 31, 32)
    run = ["run", "--headless", "digits", "--model", "cnn", "--ranks", "2", "run.log_every=1", "run.max_restarts=3"]
    done = gputrain(*run, "optim.nonfinite=skip", "optim.nonfinite_limit=2", "--name", "a", "checkpoint.every_steps=1")
    assert done.returncode == 1
    events = read_events(gputrain.runs / "a")
    assert [e["step"] for e in events if e["type"] == "step" and e["losses"] == [None]] == [1, 12, 13, 30, 31, 32]
    [epoch] = (event for event in events if event["type"] == "epoch")
    assert epoch["skipped_steps"] == 3
    assert epoch["val_accuracy"] > 0.5
    [failed] = (event for event in events if event["type"] == "rank_failed")
    assert failed["repeats"], "a restart would fail in the same way"
    assert "step 32 " in failed["cause"]
    assert "on rank 1" in failed["cause"]
    assert tracebacks(gputrain) == 1
    best, last = (
        torch.load(gputrain.runs / "a" / "checkpoints" / f"{name}.pt", weights_only=True) for name in ("best", "last")
    )
    assert best["ranks"][0]["counts"].tolist() == [0, 0, 0], "the counts of the first epoch are reset at its end"
    correct, images, unreadable = last["ranks"][0]["counts"].tolist()
    # Of the steps 23 to 31, all ranks skipped two.
    assert (last["step"], images, unreadable) == (31, 7 * 32, 0)
    assert 0 < correct <= images
    assert all(weights.isfinite().all() for weights in last["model"].values())


def test_skipped_steps_limit_counts_consecutive_steps() -> None:
    skipped = SkippedSteps(max_consecutive=2)
    assert [skipped.add(bad) for bad in (True, True, False, True, True, True)] == [False] * 5 + [True]
    assert (skipped.total, skipped.consecutive) == (5, 3)


def write_images(folder: Path, count: int) -> None:
    from PIL import Image

    for label in ("a", "b"):
        for number in range(count):
            path = folder / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16), number).save(path)


FOLDER = ["run", "--headless", "--name", "a", "--model", "linear", "--dataset", "folder", "--data-path", "images"]
FOLDER += ["--batch-size", "2", "data.image_size=8", "data.prefetch=1", "--epochs", "100000"]
FOLDER += ["data.pipeline=stream"]


@pytest.mark.nightly
def test_killed_loader_process_is_reported_with_cause(gputrain: Gputrain) -> None:
    write_images(gputrain.folder / "images", 8)
    process = gputrain.start(*FOLDER, "--workers", "2")
    gputrain.wait_for_event("a", "epoch")
    psutil.Process(find_rank_pids(process, gputrain)[0]).children()[0].kill()
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 1
    assert read_failures(gputrain.runs / "a") == [(0, "process-killed")]
    assert "rank 0 (cpu) " in messages and "SIGKILL" in messages


def test_full_disk_does_not_stop_training_but_fails_run_at_end(
    gputrain: Gputrain,
) -> None:
    gputrain.runs.mkdir()
    arguments = ["run", "--headless", "digits", "--ranks", "1", "--model", "cnn", "--epochs", "4", "--name", "a"]
    arguments += ["checkpoint.keep=5"]
    # Space for some of the checkpoints, but not all.
    mount = f"mount -t tmpfs -o size=600k tmpfs {gputrain.runs}"
    done = gputrain.run_in_mount_namespace(
        f'{mount} && {{ "$@"; code=$?; cp -r {gputrain.runs} kept; exit $code; }}', *arguments
    )
    assert says(done.stderr, "not-writable", "warning: ", "No space left on device")
    assert "epoch   4" in done.stderr
    assert "(No space left on device)" in last_line(done)
    ended = read_events(gputrain.folder / "kept" / "a")[-1]
    assert says(ended["message"], "not-writable", "No space left on device")
    assert done.returncode == 1
    assert read_events(gputrain.folder / "kept" / "a")[-1]["state"] == "failed", "the end is recorded"
    kept = gputrain.folder / "kept" / "a" / "checkpoints"
    assert not list(kept.glob(".*")), "no incomplete file"
    path, _, damaged = load_newest(kept)
    assert path is not None, "the last intact checkpoint loads"
    assert damaged == []


def test_failed_requeue_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "no such job" >&2\nexit 1\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert requeue_clause().startswith(
        "; job 77 could not be requeued (scontrol: no such job); submit its script again"
    )


def test_requeued_job_resumes_its_run(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "a", make_run_started())
    config = resolve_config(None, ["run.name=a", "run.requeue=true"]).config
    owned = Owner(RunRequest(config, tmp_path, "a"))
    with owned.held:
        assert not claim(owned.requested, config).run.is_new
