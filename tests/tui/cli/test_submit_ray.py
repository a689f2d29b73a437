"""`gputrain run --on ray:ADDRESS`: the run folder of a job, the state of the run by its job, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.runs.batch.job import read_job, require_no_open_job
from engine.runs.folder import RunFolder, RunState
from support.messages import raises_problem
from support.runs.trained_run import call
from support.servers.ray_stand_in import RayStandIn, ray_stand_in
from support.submission import state_of, submit


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayStandIn]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path / "here" / "runs"))
    monkeypatch.setattr("engine.runs.batch.ray.find_spec", lambda _: True)
    with ray_stand_in() as server:
        yield server


@pytest.fixture
def submitted(server: RayStandIn, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    submit(monkeypatch, "run", "digits", "--on", server.place, "--ngpu", "2", "--nodes", "2", "--name", "a")
    return RunFolder(Path("runs/a").absolute())


def test_submitted_training_takes_the_gpus_that_ray_shows_it(submitted: RunFolder, server: RayStandIn) -> None:
    job = read_job(submitted)
    assert job is not None and (job.engine, [job.id]) == (server.place, [*server.jobs])
    last = (submitted.path / "job.sh").read_text().splitlines()[-1]
    assert " -m engine.runs.batch.ray 4 1 " in last
    assert last.endswith("run --headless digits --name a --resume --gpus all")


def test_run_has_the_words_of_ray_until_its_job_has_ended(submitted: RunFolder, server: RayStandIn) -> None:
    assert state_of("a") == ("waiting", "pending (Waiting.)")
    server.tell("RUNNING", driver_agent_http_address="http://10.0.0.7:1")
    assert state_of("a") == ("starting", "running on 10.0.0.7")
    server.tell("FAILED", message="exit code 2")
    state, message = state_of("a")
    assert state == "failed" and "failed (exit code 2); see `gputrain logs a`" in message


def test_stop_stops_the_job_of_a_run_that_waits(submitted: RunFolder, server: RayStandIn) -> None:
    [job] = server.jobs
    result = call("stop", "a")
    assert (result.exit_code, result.stderr) == (0, f"a is stopped: {server.place} job {job} is cancelled.\n")
    assert server.requests[-1] == f"POST /api/jobs/{job}/stop"


def test_stop_says_how_to_free_a_run_of_a_cluster_that_is_gone(submitted: RunFolder, server: RayStandIn) -> None:
    server.refusal = "gone"
    result = call("stop", "a")
    assert result.exit_code == 2 and f"delete {submitted.path}/job.json" in result.stderr.replace("\n", "")


def test_run_starts_only_in_its_job(submitted: RunFolder, server: RayStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_problem("already-running", "a", "pending"):
        require_no_open_job(submitted, RunState.WAITING)
    [job] = server.jobs
    monkeypatch.setenv("GPUTRAIN_RAY_JOB", job)
    require_no_open_job(submitted, RunState.WAITING)


def test_command_keeps_its_time_limit(server: RayStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--ngpu", "1", "--time-limit", "90min", "--print", "--", "true")
    assert submit(monkeypatch, "run", "--on", server.place, *words).endswith(" --resume queue.time_limit=90 -- true\n")


@pytest.mark.parametrize(("words", "refusal"), [
    (("--time-limit", "1h"), "queue.time_limit: is not available for a training on ray:"),
    (("--snapshot",), "for a training whose ranks ray:"),
    (("--slurm=--x",), "are for --on slurm"),
])  # fmt: skip
def test_what_no_job_can_do_is_refused(
    server: RayStandIn, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], refusal: str
) -> None:
    assert refusal in submit(monkeypatch, "run", "digits", "--on", server.place, "--ngpu", "0", *words, code=2)
    assert not Path("runs").exists()
