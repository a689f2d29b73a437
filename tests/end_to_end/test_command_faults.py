"""Faults of commands that `gputrain run -- COMMAND` runs, in real processes: what it reports, keeps and leaves behind.

After each test, the fixture `gputrain` checks that no process is left. The table in tests/README.md lists all faults.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import psutil
import pytest

from support.gputrain_command import GPUTRAIN, Gputrain, read_events, wait_for
from support.messages import says

RUN = ("run", "--headless", "--gpus", "cpu", "--name", "a")
PYTHON = (sys.executable, "-I", "-S", "-c")


def warnings(gputrain: Gputrain, code: str) -> list[str]:
    return [event["message"] for event in read_events(gputrain.runs / "a") if event.get("code") == code]


def start(gputrain: Gputrain, *command: str) -> subprocess.Popen[str]:
    """Start a command, and wait until it has printed `ready`."""
    process = gputrain.start(*RUN, "--", *command)
    log = gputrain.runs / "a" / "log.txt"
    wait_for(lambda: log.exists() and "\nready" in log.read_text(), "the output of the command")
    return process


def sleepers(gputrain: Gputrain) -> list[psutil.Process]:
    """Return the processes that commands of this test have left."""
    return [process for process in gputrain.processes() if process.name() == "sleep"]


ESCAPES = """
trap '' HUP INT TERM
setsid sleep 61 &
nohup sleep 61 >/dev/null 2>&1 &
"""


@pytest.mark.nightly
def test_survivors_of_a_killed_supervisor_are_named_and_can_be_stopped(gputrain: Gputrain) -> None:
    supervisor = start(gputrain, "sh", "-c", f"{ESCAPES} echo ready; wait")
    wait_for(lambda: len(sleepers(gputrain)) >= 2, "the processes of the command")
    keeper = next(child for child in psutil.Process(supervisor.pid).children() if "keeper" in str(child.cmdline()))
    # Stopped, it cannot kill the others before it is killed, too.
    keeper.suspend()
    supervisor.kill()
    supervisor.wait()
    keeper.kill()
    wait_for(lambda: not keeper.is_running(), "the end of the keeper")
    named = gputrain("runs").stderr
    survivors = [process.pid for process in sleepers(gputrain)]
    assert survivors and "gputrain stop a" in named
    assert any(str(pid) in named for pid in survivors)
    stopped = gputrain("stop", "a")
    assert (stopped.returncode, sleepers(gputrain)) == (0, [])


def test_run_that_a_command_starts_in_the_background_outlives_it(gputrain: Gputrain) -> None:
    inner = f"{GPUTRAIN} run --detach --gpus cpu --name inner -- sleep 600"
    done = gputrain(*RUN, "--", "sh", "-c", f"{inner}; (sleep 61 &)")
    assert done.returncode == 0 and warnings(gputrain, "process-left"), done.stderr
    assert len(sleepers(gputrain)) == 1
    stopped = gputrain("stop", "inner")
    assert "inner is stopped" in stopped.stdout + stopped.stderr, stopped.stderr


def test_binary_output_and_escape_sequences_reach_no_terminal(gputrain: Gputrain) -> None:
    program = r"""
import os, sys
out = sys.stdout.buffer
out.write(bytes(range(256)) * 400 + b"\x1b]0;title\x07\x1b[2J\x1b[?1049h\x1bc\x90q#\x9c\x1b]52;c;eA==\x1b\\")
out.write("\N{RIGHT-TO-LEFT OVERRIDE}end\n".encode() + b"\x1b[31mred\x1b[0m\n")
"""
    done = gputrain(*RUN, "--", *PYTHON, program)
    assert done.returncode == 0
    log = (gputrain.runs / "a" / "log.txt").read_text()
    for text in (done.stdout, done.stderr, log, gputrain("logs", "a").stdout):
        controls = set(re.sub(r"\x1b\[[\d;]*m", "", text)) & {chr(code) for code in (*range(9), *range(11, 32), 127)}
        assert not controls and "\N{RIGHT-TO-LEFT OVERRIDE}" not in text
    assert "red" in log


def test_command_whose_run_folder_is_moved_is_asked_to_stop_and_loses_nothing_written(gputrain: Gputrain) -> None:
    run = start(
        gputrain,
        "sh",
        "-c",
        "trap 'echo step 2 loss=0.25; exit 4' INT; echo step 1 loss=0.5; echo ready; sleep 61 & wait",
    )
    metrics = gputrain.runs / "a" / "metrics" / "output.jsonl"
    wait_for(metrics.exists, "the metrics of the output")
    moved = (gputrain.runs / "a").rename(gputrain.runs / "moved")
    (gputrain.runs / "a").mkdir()
    assert run.wait(60) == 4 and list((gputrain.runs / "a").iterdir()) == []
    assert '"loss": 0.25' in (moved / "metrics" / "output.jsonl").read_text()
    end, record = read_events(moved)[-1], json.loads((moved / "summary.json").read_text())
    assert (end["state"], record["state"], record["metrics"]["loss"]) == ("stopped", "stopped", 0.25)
    assert f"`gputrain resume {moved}`" in end["message"]


@pytest.mark.parametrize("is_freed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_full_disk_ends_no_command(gputrain: Gputrain, is_freed: bool) -> None:
    gputrain.runs.mkdir()
    script = f"""
    cat /dev/zero > {gputrain.runs}/ballast
    for i in 1 2 3 4 5 6 7 8 9; do echo "step $i loss=0.$i"; done
    for i in $(seq 600); do grep -q "^warning: " {gputrain.folder}/said && break; sleep 0.1; done
    {f"rm {gputrain.runs}/ballast" if is_freed else ""}
    exit 4
    """
    mount = f"mount -t tmpfs -o size=500k tmpfs {gputrain.runs}"
    keep = f'{{ "$@" 2> said; code=$?; cat said >&2; cp -r {gputrain.runs}/a kept; exit $code; }}'
    done = gputrain.run_in_mount_namespace(f"{mount} && {keep}", *RUN, "--", "sh", "-c", script)
    assert done.returncode == 4, done.stderr
    assert says(done.stderr, "not-writable", "warning: ")
    assert "Traceback" not in done.stderr
    if is_freed:
        ended = read_events(gputrain.folder / "kept")[-1]
        assert (ended["type"], ended["exit_code"]) == ("run_finished", 4)
