"""Ray: the script of a job, its request without secrets, the words of its states, and one rank in a worker."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.runs.batch.engine import BatchError, JobPhase, JobRequest
from engine.runs.batch.ray import Ray, run_rank
from engine.runs.batch.states import find_engine
from support.servers.ray_stand_in import RayStandIn, ray_stand_in

COMMAND = JobRequest("a", Path("/work"), Path("/runs/a/job.log"), "gputrain run", gpus=2, cores=4)
TRAINING = replace(COMMAND, nodes=2, tasks_per_node=2)


@pytest.fixture
def server() -> Iterator[RayStandIn]:
    with ray_stand_in() as server:
        yield server


@pytest.mark.parametrize("address", ["", "auto", "head", "local", "ray://head:10001", "head:8265 x"])
def test_address_must_name_a_job_server(address: str) -> None:
    with pytest.raises(BatchError, match="type --on ray:HOST:8265"):
        find_engine(f"ray:{address}")


def test_script_of_command_reserves_what_it_asks_for() -> None:
    lines = Ray("head:8265").script(COMMAND).splitlines()
    assert lines[1] == '# Ray reserves {"entrypoint_num_cpus":4,"entrypoint_num_gpus":2}.'
    assert lines[2:4] == ["exec >>/runs/a/job.log 2>&1", "cd /work || exit 1"]
    assert lines[4:] == [". /runs/a/job.env && rm /runs/a/job.env || exit 1", "exec gputrain run"]


def test_script_of_training_has_a_worker_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runs.batch.ray.find_spec", lambda _: True)
    lines = Ray("head:8265").script(TRAINING).splitlines()
    assert lines[1] == "# Ray reserves {}."
    assert lines[-1].endswith("-P -m engine.runs.batch.ray 4 1 /runs/a/job.log gputrain run")


@pytest.mark.parametrize(("request_", "words"), [
    (replace(COMMAND, partition="gpu"), "are for --on slurm"),
    (replace(COMMAND, nodes=2), "a command runs on one node"),
    (replace(COMMAND, array_size=3), "no arrays"),
    (TRAINING, r"ray is not installed.*pip install '.\[ray\]'"),
])  # fmt: skip
def test_what_ray_cannot_do_is_refused(request_: JobRequest, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runs.batch.ray.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=words):
        Ray("head:8265").script(request_)


def test_environment_is_in_a_private_file_and_not_in_the_request(
    server: RayStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "it's\nsecret")
    monkeypatch.setenv("RAY_ADDRESS", "other")
    engine, script = find_engine(server.place), tmp_path / "job.sh"
    request = replace(COMMAND, log=tmp_path / "job.log", folder=tmp_path, command="env -0")
    script.write_text(engine.script(request))
    job = engine.submit(script, request)
    [posted] = server.jobs.values()
    assert (posted["entrypoint"], posted["entrypoint_num_gpus"]) == (f"exec bash {script}", 2)
    assert "secret" not in str(posted)
    assert (tmp_path / "job.env").stat().st_mode & 0o077 == 0
    subprocess.run(["bash", script], env={"RAY_ADDRESS": "cluster"}, check=True)
    assert not (tmp_path / "job.env").exists()
    found = (tmp_path / "job.log").read_text().split("\0")
    assert {"MY_TOKEN=it's\nsecret", "RAY_ADDRESS=cluster", f"GPUTRAIN_RAY_JOB={job}"} <= {*found}


@pytest.mark.parametrize(("status", "fields", "phase", "words"), [
    ("PENDING", {"message": "Waiting for GPUs."}, JobPhase.PENDING, "pending (Waiting for GPUs.)"),
    ("RUNNING", {"driver_agent_http_address": "http://10.0.0.7:52365"}, JobPhase.RUNNING, "running on 10.0.0.7"),
    ("SUCCEEDED", {}, JobPhase.COMPLETED, "succeeded"),
    ("STOPPED", {}, JobPhase.CANCELLED, "stopped"),
    ("FAILED", {"message": "Node died.\nlog"}, JobPhase.FAILED, "failed (Node died.)"),
    ("FAILED", {"message": "Long", "driver_exit_code": 2}, JobPhase.FAILED, "failed (exit code 2)"),
])  # fmt: skip
def test_states_are_in_words_of_ray(
    server: RayStandIn, status: str, fields: dict[str, object], phase: JobPhase, words: str
) -> None:
    server.jobs["driver"] = {"submission_id": None, "status": "RUNNING"}
    server.jobs["a"] = {"submission_id": "a", "status": status, **fields}
    states = find_engine(server.place).states(None)
    assert ([*states], states["a"].phase, states["a"].words) == (["a"], phase, words)


def test_training_whose_workers_wait_is_pending(server: RayStandIn) -> None:
    server.jobs["a"] = {"submission_id": "a", "job_id": "02000000", "status": "RUNNING"}
    server.jobs["b"] = server.jobs["a"] | {"submission_id": "b", "job_id": "03000000"}
    group = {"creator_job_id": "02000000", "bundles": [{}, {}], "stats": {"scheduling_state": "NO_RESOURCES"}}
    server.pending = [group]
    states = find_engine(server.place).states(None)
    assert (states["a"].phase, states["a"].words) == (JobPhase.PENDING, "pending (NO_RESOURCES, 2 workers)")
    assert states["b"].phase is JobPhase.RUNNING


def test_refusal_is_the_last_line_of_a_traceback(server: RayStandIn) -> None:
    server.refusal = "Traceback (most recent call last):\n  File x\nValueError: job a exists\n"
    with pytest.raises(BatchError, match=r"http://127.0.0.1:\d+: ValueError: job a exists"):
        find_engine(server.place).states(None)


def test_missing_server_is_named() -> None:
    with pytest.raises(BatchError, match=r"no job server of Ray answers at http://127\.0\.0\.1:9: "):
        Ray("127.0.0.1:9").cancel("a")


def test_rank_joins_the_store_of_ray_and_keeps_the_environment_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "5", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    environment = {"PWD": str(tmp_path), "PATH": "/usr/bin:/bin", "RANK": "9"}
    assert run_rank(["sh", "-c", "env; pwd; exit 3"], environment, tmp_path / "log") == 3
    lines = {*(tmp_path / "log").read_text().splitlines()}
    assert {"RANK=1", "WORLD_SIZE=2", "MASTER_PORT=5", "TORCHELASTIC_USE_AGENT_STORE=True", str(tmp_path)} <= lines
    assert "OMP_NUM_THREADS=1" not in lines


def test_killed_rank_fails_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    kill = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    with pytest.raises(RuntimeError, match=r"rank 1 on .* was killed by SIGKILL"):
        run_rank([sys.executable, "-c", kill], {"PWD": str(tmp_path)}, tmp_path / "log")
