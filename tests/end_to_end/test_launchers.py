"""Runs started by torchrun and srun: each process joins the existing process group."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore, TCPStore

from engine.base.errors import Problem
from engine.base.exit_codes import ExitCode
from engine.base.process import SignalHandler
from engine.jobs.launch.handshake import RankZeroEndedError, exit_code_of_rank_0, share_exit_code, wait_for_key
from engine.jobs.launch.node import collect_preflights, share_preflight
from engine.train.distributed.messages import merge_problems
from engine.train.distributed.rank_env import RankInfo, slurm_step_port
from support.gputrain_command import GPUTRAIN, Gputrain, SharedGputrain, read_events, without_timings
from support.messages import says
from support.runs.factories import find_free_port

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
RUN = ["run", "--headless", "digits", "--epochs", "2"]
# It binds a port of its own, which nobody else can take before.
TWO = ("--standalone", "--nproc-per-node", "2")


def slurm_job_with_free_port() -> str:
    """Return a Slurm job ID whose rendezvous port is free on this host."""
    for job in range(1, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", slurm_step_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"})))
            return str(job)
    raise AssertionError("no port is free")


def torchrun(gputrain: Gputrain, *options: str, arguments: list[str]) -> subprocess.Popen[str]:
    return gputrain.start(TORCHRUN, *options, "--no-python", GPUTRAIN, *arguments)


@pytest.fixture(scope="session")
def spawned_run_events(shared_gputrain: SharedGputrain) -> list[dict[str, object]]:
    run = shared_gputrain.train_once("spawned", GPUTRAIN, *RUN, "--name", "spawned")
    assert run.process.returncode == 0, run.process.stderr
    return without_timings(read_events(run.path))


@pytest.mark.soak
def test_torchrun_restarts_from_checkpoint_after_killed_worker_and_agent(gputrain: Gputrain) -> None:
    conf = "join_timeout=60,last_call_timeout=1"
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.3"]
    elastic += ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"]
    arguments = ["run", "--headless", "digits", "--model", "linear", "--epochs", "100000", "checkpoint.every_steps=20"]
    host, guest = (
        torchrun(gputrain, *elastic, "--rdzv-conf", f"{conf},is_host={is_host}", arguments=arguments)
        for is_host in (1, 0)
    )
    gputrain.wait_for_event("digits-1", "checkpoint", 2)
    workers = [process for process in gputrain.processes() if process.ppid() in (host.pid, guest.pid)]
    next(process for process in workers if process.ppid() == guest.pid).kill()
    gputrain.wait_for_event("digits-1", "run_resumed", 1)
    gputrain.wait_for_event("digits-1", "checkpoint", 4)
    guest.kill()
    gputrain.wait_for_event("digits-1", "run_resumed", 2)
    assert gputrain("stop", "last").stderr == "digits-1 is stopped.\n"
    _, messages = host.communicate(timeout=60)
    assert host.returncode == 0, messages
    assert [path.name for path in gputrain.runs.iterdir()] == ["digits-1"]
    resumed = [event for event in read_events(gputrain.runs / "digits-1") if event["type"] == "run_resumed"]
    assert [event["world_size"] for event in resumed] == [2, 1]
    assert 0 < resumed[0]["from_step"] < resumed[1]["from_step"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("hang", "11 steps"),
        ("freeze", "did not respond"),
    ],
)
def test_torchrun_journal_names_rank_that_hangs(gputrain: Gputrain, kind: str, state: str) -> None:
    gputrain.inject_fault(kind, 1, 12)
    agent = torchrun(gputrain, *TWO, arguments=[*RUN, "--name", "a", "run.watchdog=4", "device.timeout=60"])
    gputrain.wait_for_event("a", "run_finished")
    for process in gputrain.processes():
        # torchrun waits for half a minute until a stopped process handles SIGTERM.
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
    _, messages = agent.communicate(timeout=120)
    assert agent.returncode != 0, messages
    failed = [event for event in read_events(gputrain.runs / "a") if event["type"] == "rank_failed"]
    assert [(event["rank"], event["code"]) for event in failed] == [(1, "rank-hung")], messages
    assert " 4 s (run.watchdog)" in failed[0]["cause"] and state in failed[0]["cause"]
    assert ("in trigger" in messages) == (kind == "hang"), "the traceback of the rank"


@pytest.mark.nightly
def test_torchrun_journal_names_rank_that_fails(gputrain: Gputrain) -> None:
    gputrain.inject_fault("raise", 1, 12)
    agent = torchrun(gputrain, *TWO, arguments=[*RUN, "--name", "a"])
    _, messages = agent.communicate(timeout=120)
    failed = [event for event in read_events(gputrain.runs / "a") if event["type"] == "rank_failed"]
    assert [(event["rank"], event["cause"]) for event in failed] == [(1, "ValueError: a fault of the test")], messages


def run_srun_tasks(gputrain: Gputrain, *arguments: str) -> list[tuple[int, str]]:
    """Run two tasks as srun starts them; return the exit code and the messages of each."""
    step = {
        "SLURM_JOB_ID": slurm_job_with_free_port(),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    tasks = [
        gputrain.start(
            *arguments, env=gputrain.environment | step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
        )
        for task in range(2)
    ]
    messages = [task.communicate(timeout=120)[1] for task in tasks]
    return [(task.returncode, text) for task, text in zip(tasks, messages, strict=True)]


@pytest.mark.nightly
def test_srun_tasks_form_one_process_group(gputrain: Gputrain, spawned_run_events: list[dict[str, object]]) -> None:
    results = run_srun_tasks(gputrain, *RUN, "--name", "a")
    assert [exit_code for exit_code, _ in results] == [0, 0], results
    assert without_timings(read_events(gputrain.runs / "a")) == spawned_run_events
    # Rank 0 hosts the store and must not exit before the other task has read that there is nothing to do.
    (first, messages), (second, others) = run_srun_tasks(gputrain, *RUN, "--name", "a", "--resume")
    assert (first, second, others) == (0, 0, "")
    assert says(messages, "already-finished", "a has", "2 epochs")


def test_sbatch_shell_spawns_ranks(gputrain: Gputrain) -> None:
    shell = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "nowhere[01-02]",
    }
    # The world size is the preset's number of ranks: the four tasks of the sbatch shell are ignored.
    done = gputrain(*RUN, "--batch-size", "5000", **shell)
    assert done.returncode == 2
    assert says(done.stderr, "too-large", "error: data.batch_size: ", "2 x 5000 ")


def test_exit_code_of_rank_0_is_read_from_store() -> None:
    store = HashStore()
    assert exit_code_of_rank_0(store, timeout_s=0.1) is None
    share_exit_code(store, ExitCode.STOPPED, world_size=1)
    assert exit_code_of_rank_0(store) == ExitCode.STOPPED


def test_exit_code_of_rank_0_is_usage_error_once_its_store_is_gone() -> None:
    own_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", own_store.port, is_master=False)
    del own_store
    assert exit_code_of_rank_0(store) == ExitCode.USAGE_ERROR
    share_exit_code(store, ExitCode.STOPPED, world_size=1)


def test_wait_for_key_ends_with_rank_0() -> None:
    store = HashStore()
    store.set("rank_0_exit_code", str(int(ExitCode.STOPPED)))
    with pytest.raises(RankZeroEndedError) as ended:
        wait_for_key(store, "gpus/host", SignalHandler())
    assert ended.value.exit_code == ExitCode.STOPPED
    share_exit_code(store, ExitCode.STOPPED, world_size=2)


def test_problems_of_all_ranks_are_reported_once_and_name_the_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    store, own_problem = HashStore(), Problem("data.path", "/data does not exist", "give another", code="not-found")
    monkeypatch.setattr("engine.jobs.launch.node.socket.gethostname", lambda: "n1")
    lost = Problem("device.gpus", "GPU 3 is lost", code="gpu-lost")
    share_preflight(RankInfo(1, 3, 0, 1), store, [own_problem, lost])
    share_preflight(RankInfo(2, 3, 0, 1), store, [])
    others = collect_preflights(RankInfo(0, 3, 0, 1), store, SignalHandler())
    problems = merge_problems([own_problem], others)
    assert [str(problem) for problem in problems] == [str(own_problem), "device.gpus: GPU 3 is lost (on n1)"]
