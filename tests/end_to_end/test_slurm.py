"""A real Slurm of two nodes on this host: a submitted run waits, is cancelled, trains on two nodes, is requeued."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.gputrain_command import Gputrain, shown_state, step_losses, wait_for
from support.ports import free_ports

DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch")
missing = [tool for tool in DAEMONS if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0 or bool(missing), reason=f"needs root and {', '.join(DAEMONS)}"),
]
# Slurm lets a requeued job wait for two minutes.
REQUEUE_SECONDS = 300.0


@pytest.fixture
def slurm(gputrain: Gputrain, tmp_path: Path) -> Iterator[Gputrain]:
    """Start the daemons, and let `gputrain` use them."""
    conf, host = tmp_path / "slurm.conf", socket.gethostname().partition(".")[0]
    port, *ports = free_ports(3)
    names = {"SlurmctldHost": f"{host}(127.0.0.1)", "ClusterName": "test", "SlurmUser": "root", "SlurmdUser": "root"}
    names |= {"StateSaveLocation": tmp_path / "state", "SlurmdSpoolDir": tmp_path / "spool-%n", "MpiDefault": "none"}
    names |= {"SlurmctldPidFile": tmp_path / "ctld.pid", "SlurmdPidFile": tmp_path / "%n.pid", "SlurmctldPort": port}
    names |= {"SlurmctldLogFile": tmp_path / "ctld.log", "SlurmdLogFile": tmp_path / "%n.log", "ReturnToService": 2}
    names |= {"ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "SelectType": "select/cons_tres"}
    node = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=1000 State=UNKNOWN"
    lines = [f"{name}={value}" for name, value in names.items()]
    lines += [f"NodeName=node{number} Port={each} {node}" for number, each in enumerate(ports)]
    conf.write_text("\n".join([*lines, "PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4\n"]))
    started = [
        ["slurmctld", "-D", "-f", str(conf)],
        *(["slurmd", "-D", "-N", f"node{n}", "-f", str(conf)] for n in (0, 1)),
    ]
    if subprocess.run(["pgrep", "-x", "munged"], capture_output=True, check=False).returncode:
        pytest.skip("munged does not run")
    (tmp_path / "state").mkdir()
    daemons = [subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for argv in started]
    # The names of the nodes are in no DNS.
    gputrain.environment |= {"SLURM_CONF": str(conf), "MASTER_ADDR": "127.0.0.1"}
    try:
        wait_for(lambda: ask(gputrain, "sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "two idle nodes")
        yield gputrain
    finally:
        ask(gputrain, "scancel", "-u", "root")
        time.sleep(2)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def ask(gputrain: Gputrain, *argv: str) -> str:
    return subprocess.run(argv, env=gputrain.environment, capture_output=True, text=True, check=False).stdout.strip()


def submit(gputrain: Gputrain, *words: str, command: Sequence[str] = ("run",)) -> None:
    done = gputrain(*command, "digits", "--on", "slurm", "--ngpu", "0", "--ranks", "1", *words)
    assert done.returncode == 0, done.stderr


def test_pending_job_has_its_reason_and_is_cancelled(slurm: Gputrain) -> None:
    submit(slurm, "--name", "held", "--slurm=--hold")
    wait_for(lambda: shown_state(slurm, "held") == ("waiting", "pending (JobHeldUser)"), "the reason")
    assert slurm("stop", "held").returncode == 0
    assert shown_state(slurm, "held")[0] == "stopped"
    assert ask(slurm, "squeue", "-h") == ""


def test_ranks_train_on_both_nodes(slurm: Gputrain) -> None:
    submit(slurm, "--name", "two", "--nodes", "2", "--epochs", "1")
    assert slurm("wait", "two", "--timeout", "2min").returncode == 0
    assert json.loads(slurm("runs", "show", "two", "--json").stdout)["ranks"] == 2


@pytest.mark.timeout(600)
def test_sweep_runs_as_an_array_of_jobs(slurm: Gputrain) -> None:
    words = ("optim.lr=0.05,0.1,0.2", "--trials", "3", "--parallel", "2", "--epochs", "1", "--name", "s")
    submit(slurm, *words, command=("sweep",))

    def sweep() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(slurm("sweep", "show", "s", "--json").stdout)
        return found

    wait_for(lambda: sweep()["counts"] == {"complete": 3}, "the trials", REQUEUE_SECONDS)
    wait_for(lambda: not sweep()["running"], "the end of the array")
    trials = map(json.loads, (slurm.runs / "s/optuna.jsonl").read_text().splitlines())
    tasks = [trial["user_attrs"]["task"].partition("_")[2] for trial in trials if "user_attrs" in trial]
    assert sorted(filter(None, tasks)) == ["0", "1", "2"]


@pytest.mark.timeout(600)
def test_run_that_reaches_its_time_limit_says_so(slurm: Gputrain) -> None:
    # Without the warning of Slurm, which would let it be requeued.
    submit(slurm, "--name", "late", "--epochs", "3000", "--time-limit", "1min", "--slurm=--signal=B:CONT@1")
    wait_for(lambda: "timeout" in shown_state(slurm, "late")[1], "the time limit", REQUEUE_SECONDS)
    assert shown_state(slurm, "late")[0] == "stopped"


@pytest.mark.timeout(600)
def test_requeued_run_goes_on_to_the_same_losses(slurm: Gputrain) -> None:
    submit(slurm, "--name", "a", "--epochs", "20")
    wait_for(lambda: (slurm.runs / "a/checkpoints/last.pt").exists(), "a checkpoint")
    job = json.loads((slurm.runs / "a/job.json").read_text())["id"]
    ask(slurm, "scontrol", "requeue", job)
    wait_for(
        lambda: shown_state(slurm, "a")[1].startswith("requeued, pending (BeginTime), starts about"), "the requeue"
    )
    wait_for(lambda: shown_state(slurm, "a")[0] == "finished", "the end", REQUEUE_SECONDS)
    assert (
        slurm(
            "run", "digits", "--headless", "--gpus", "cpu", "--ranks", "1", "--epochs", "20", "--name", "b"
        ).returncode
        == 0
    )
    assert step_losses(slurm.runs / "a") == step_losses(slurm.runs / "b")
