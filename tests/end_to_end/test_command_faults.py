"""Faults of commands that `gputrain run -- COMMAND` runs, in real processes: what it reports, keeps and leaves behind.

After each test, the fixture `gputrain` checks that no process is left. The table in tests/README.md lists all faults.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from support.gputrain_command import GPUTRAIN, Gputrain, read_events, read_failures, wait_for
from support.messages import says
from support.runs.command_owner import unchanged_process
from tui.cli.main import app

RUN = ("run", "--headless", "--gpus", "cpu", "--name", "a")
PYTHON = (sys.executable, "-I", "-S", "-c")
# Processes of every kind that outlive the process which started them, and ignore what they can.
ESCAPES = """
trap '' HUP INT TERM
(sleep 61 &)
setsid sleep 61 &
env -i setsid sh -c 'sleep 61 & exit'
nohup sleep 61 >/dev/null 2>&1 &
"""
FORKS = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
for _ in range(60):
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
"""


def summary(gputrain: Gputrain) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((gputrain.runs / "a" / "summary.json").read_text())
    return found


def warnings(gputrain: Gputrain, code: str) -> list[str]:
    return [event["message"] for event in read_events(gputrain.runs / "a") if event.get("code") == code]


def start(gputrain: Gputrain, *command: str) -> subprocess.Popen[str]:
    """Start a command, and wait until it has printed `ready`."""
    process = gputrain.start(*RUN, "--", *command)
    log = gputrain.runs / "a" / "log.txt"
    wait_for(lambda: log.exists() and "\nready" in log.read_text(), "the output of the command")
    return process


def sleepers(gputrain: Gputrain) -> list[psutil.Process]:
    """Return the processes of `ESCAPES` that have the environment of this test."""
    return [process for process in gputrain.processes() if process.name() == "sleep"]


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "place"),
    [
        (["--", "no-such-command"], 127, "command-not-found", "no-such-command"),
        (["--", "./data"], 126, "command-not-executable", "./data"),
        (["--cwd", "missing", "--", "true"], 125, "not-found", "--cwd"),
    ],
)
def test_exit_code_says_why_a_command_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, kind: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").touch()
    with unchanged_process():
        done = CliRunner().invoke(app, [*RUN, "--runs-dir", str(tmp_path / "runs"), *arguments], prog_name="gputrain")
    assert done.exit_code == code
    assert done.stderr.startswith(f"error: {place}: ") and len(done.stderr.splitlines()) == 1
    assert kind == "not-found" or says(done.stderr, kind)
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.nightly
def test_signal_that_ends_a_command_is_in_the_exit_code(gputrain: Gputrain) -> None:
    done = gputrain(*RUN, "--", "sh", "-c", "kill -SEGV $$")
    assert done.returncode == 139
    assert "was killed by SIGSEGV" in done.stderr and summary(gputrain)["exit_code"] == -11


def test_command_ends_with_its_supervisor_that_is_killed(gputrain: Gputrain) -> None:
    supervisor = start(gputrain, "sh", "-c", f"{ESCAPES} echo ready; wait; sleep 60")
    wait_for(lambda: len(sleepers(gputrain)) >= 3, "the processes of the command")
    supervisor.kill()
    wait_for(lambda: not gputrain.processes(), "the end of the processes", 10)
    listed = gputrain("runs")
    assert "crashed" in listed.stdout


def test_run_that_a_command_starts_in_the_background_outlives_it(gputrain: Gputrain) -> None:
    inner = f"{GPUTRAIN} run --detach --gpus cpu --name inner -- sleep 600"
    done = gputrain(*RUN, "--", "sh", "-c", f"{inner}; (sleep 61 &)")
    assert done.returncode == 0 and warnings(gputrain, "process-left"), done.stderr
    assert len(sleepers(gputrain)) == 1
    stopped = gputrain("stop", "inner")
    assert "inner is stopped" in stopped.stdout + stopped.stderr, stopped.stderr


def test_what_a_command_leaves_behind_is_ended_and_named(gputrain: Gputrain) -> None:
    done = gputrain(*RUN, "--", *PYTHON, FORKS)
    assert done.returncode == 0
    [message] = warnings(gputrain, "process-left")
    assert re.search(r"python\S* \(\d+\), .* and 57 more", message)


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


@pytest.mark.nightly
def test_gigabyte_without_a_newline_needs_little_memory(gputrain: Gputrain) -> None:
    process = gputrain.start(*RUN, "--", "sh", "-c", "head -c 1000000000 /dev/zero | tr '\\0' x; echo; echo ready")
    most = 0
    supervisor = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            most = max(most, supervisor.memory_info().rss)
        except psutil.Error:
            break
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    assert process.wait() == 0
    assert most < 200e6
    log = (gputrain.runs / "a" / "log.txt").read_bytes()
    assert b"ready" in log and len(log) < 1e6


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


def test_metric_files_that_change_under_the_reader(gputrain: Gputrain) -> None:
    script = """
    exec 2>&1
    mkdir logs; mkfifo logs/metrics.jsonl; ln -s /etc/passwd logs/other.jsonl; truncate -s 5G logs/huge.jsonl
    echo '{"step": 1, "loss": 0.5}' >> $GPUTRAIN_METRICS; echo '{"step": 1, "score": 1}' > logs/own.jsonl; sleep 1.2
    : > $GPUTRAIN_METRICS; echo '{"step": 2, "loss": 0.25}' >> $GPUTRAIN_METRICS
    mv logs/own.jsonl logs/own.jsonl.1; echo '{"step": 2, "score": 2}' > logs/own.jsonl; sleep 1.2
    """
    done = gputrain(*RUN, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    metrics = summary(gputrain)["metrics"]
    assert (metrics["loss"], metrics["score"]) == (0.25, 2.0)


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


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["raise ValueError('no such label')", "os.kill(os.getpid(), 9)"])
def test_torchrun_rank_that_dies_is_named_with_its_last_lines(gputrain: Gputrain, fault: str) -> None:
    program = f"""
import os, time
print("rank", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    {fault}
time.sleep(60)
"""
    (gputrain.folder / "train.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = gputrain(*RUN, "--", *torchrun)
    assert done.returncode == 1
    kind = "process-failed" if "raise" in fault else "process-killed"
    assert read_failures(gputrain.runs / "a") == [(1, kind)]
    [failed] = [event for event in read_events(gputrain.runs / "a") if event["type"] == "rank_failed"]
    last = failed["traceback"].splitlines()[-1]
    assert last == ("ValueError: no such label" if "raise" in fault else "rank 1")
    assert "rank 1 (cpu) failed" in done.stderr.splitlines()[-1]
