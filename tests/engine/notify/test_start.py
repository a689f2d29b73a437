"""The watcher of a run is a process of its own, which its owner starts again if it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.notify import start
from engine.notify.observer import CRASH_GRACE_SECONDS, RESTART_GRACE_SECONDS, WatchOptions
from engine.notify.start import RunNotifier, start_watcher
from engine.runs import sinks
from engine.runs.claimed_run import ClaimedRun, claim_run
from engine.utils.codec import read_record
from support.gputrain_command import wait_for
from support.messages import has_problem

# Takes the place of Python, and stores what the watcher gets: its options and its descriptors.
RECORDER = """#!/bin/sh
cat > "{folder}/options"
ls /proc/self/fd > "{folder}/descriptors"
"""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("NTFY", "json://127.0.0.1:9")
    return resolve_config("digits", ["notify.urls=env:NTFY"]).config


@pytest.fixture
def claimed(tmp_path: Path) -> Iterator[ClaimedRun]:
    claimed = claim_run(tmp_path, "a", "x", resume=False)
    yield claimed
    claimed.ownership.release()


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with the files of `RECORDER`."""
    script = tmp_path / "recorder"
    script.write_text(RECORDER.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path


def ignored_signals(pid: int) -> set[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    return {number for number in range(1, 65) if mask >> number - 1 & 1}


def test_killed_watcher_is_reported_once_and_started_again(
    claimed: ClaimedRun, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "RETRY_SECONDS", 0.0)
    notifier, warnings = start_watcher(claimed.folder, config)
    try:
        assert warnings == []
        killed = notifier.process
        assert killed is not None
        assert notifier.keep_alive(claimed.folder, config) == []
        killed.kill()
        killed.wait()
        assert has_problem(notifier.keep_alive(claimed.folder, config), "switched-off", "", "SIGKILL", "0 s")
        assert [warning.code for warning in notifier.keep_alive(claimed.folder, config)] == ["recovered"]
        assert notifier.process is not killed
        assert notifier.process is not None
        pid = notifier.process.pid
        name = b"engine.notify.watcher"
        wait_for(lambda: name in Path(f"/proc/{pid}/cmdline").read_bytes(), "the new watcher")
        # The terminal of the run sends both when it is closed.
        wait_for(lambda: {signal.SIGINT, signal.SIGHUP} <= ignored_signals(pid), "ignored signals")
        assert notifier.keep_alive(claimed.folder, config) == []
    finally:
        if notifier.process is not None:
            notifier.process.kill()
            notifier.process.wait()
    assert not os.path.lexists(claimed.folder.path / "notify.log")


def test_watcher_that_cannot_be_started_is_tried_again(
    claimed: ClaimedRun, config: Config, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "RETRY_SECONDS", 0.0)
    failed = subprocess.Popen(["false"])
    failed.wait()
    notifier = RunNotifier(failed)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(recorder / "missing"))
        assert [len(notifier.keep_alive(claimed.folder, config)) for _ in range(3)] == [1, 0, 0]
        assert notifier.process is failed
    assert len(notifier.keep_alive(claimed.folder, config)) == 1
    assert notifier.process is not failed
    assert notifier.process is not None and notifier.process.wait() == 0


def test_watcher_gets_its_session_and_no_descriptor_of_the_run(
    claimed: ClaimedRun, config: Config, recorder: Path
) -> None:
    claimed.folder.journal.write_bytes(b"x" * 7)
    inherited, other = os.pipe()
    os.set_inheritable(inherited, True)
    notifier, warnings = start_watcher(claimed.folder, config, waited_s=3.0, gpus=["GPU-0"])
    os.close(inherited)
    os.close(other)
    assert warnings == []
    assert notifier.process is not None and notifier.process.wait() == 0
    options = read_record(recorder / "options", WatchOptions)
    assert options.folder == str(claimed.folder.path)
    assert options.inode == claimed.folder.path.stat().st_ino
    assert options.owner_pid == os.getpid()
    assert options.journal_start == notifier.journal_start == 7
    assert (options.urls, options.on) == (("env:NTFY",), config.notify.when)
    assert (options.waited_s, options.gpus) == (3.0, ("GPU-0",))
    assert options.crash_grace_s == CRASH_GRACE_SECONDS
    assert str(inherited) not in (recorder / "descriptors").read_text().split()


def test_watcher_of_torchrun_waits_longer_for_another_owner(
    claimed: ClaimedRun, config: Config, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    notifier, _ = start_watcher(claimed.folder, config)
    assert notifier.process is not None and notifier.process.wait() == 0
    assert read_record(recorder / "options", WatchOptions).crash_grace_s == RESTART_GRACE_SECONDS


def test_watcher_of_run_on_cpu_reports_no_wait_for_gpus(claimed: ClaimedRun, config: Config, recorder: Path) -> None:
    notifier, _ = start_watcher(claimed.folder, config, waited_s=3.0)
    assert notifier.process is not None and notifier.process.wait() == 0
    assert read_record(recorder / "options", WatchOptions).waited_s == 0.0


@pytest.mark.parametrize("manager", ["Slurm", "container", "none"])
def test_end_of_run_waits_for_messages_only_where_its_end_kills_all_processes(
    manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if manager == "Slurm":
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    if manager == "container":
        monkeypatch.setattr(start.os, "getpid", lambda: 1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        if manager == "none":
            RunNotifier(process).wait_for_last_message()
            assert process.returncode is None
        process.stdin.close()
        if manager != "none":
            RunNotifier(process).wait_for_last_message()
            assert process.returncode == 0


def test_end_of_run_waits_for_messages_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(start, "LAST_MESSAGE_SECONDS", 0.0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        RunNotifier(process).wait_for_last_message()
        assert process.returncode is None
    RunNotifier().wait_for_last_message()
