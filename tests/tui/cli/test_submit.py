"""`gputrain run --on slurm`: the run folder of a job, the state of the run by its job, and its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.runs.batch.job import read_job, require_no_open_job, write_job
from engine.runs.control import consume_requests
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder, RunState
from engine.runs.ownership import Ownership
from support.messages import raises_problem
from support.runs.event_factories import make_run_started
from support.runs.factories import append_events, write_run_record
from support.runs.trained_run import call
from support.servers.slurm_stand_in import SlurmStandIn
from support.submission import state_of, submit
from tui.cli import run_control

SUBMIT = ("run", "digits", "--on", "slurm", "--ngpu", "0", "--name", "a")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmStandIn:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path / "here" / "runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    return SlurmStandIn(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def submitted(slurm: SlurmStandIn, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    submit(monkeypatch, *SUBMIT, "--epochs", "3")
    slurm.tell("squeue", "7|PENDING|N/A||Resources\n")
    return RunFolder(Path("runs/a").absolute())


def test_submitted_run_is_a_folder_with_its_job(submitted: RunFolder, slurm: SlurmStandIn) -> None:
    job = read_job(submitted)
    assert job is not None and (job.engine, job.id, job.phase) == ("slurm", "7", None)
    assert state_of("a") == ("waiting", "pending (Resources)")
    last = slurm.script.splitlines()[-1]
    assert last.endswith("run --headless digits --ngpu 0 --epochs 3 --name a --resume run.requeue=true")


def test_record_of_job_of_format_1_is_read(tmp_path: Path) -> None:
    text = '{"format": 1, "engine": "slurm", "id": "7", "submitted_at": 5.0, "phase": "failed", "words": "timeout"}'
    (tmp_path / "job.json").write_text(text)
    found = read_job(RunFolder(tmp_path))
    assert found is not None and (found.id, found.phase, found.words) == ("7", "failed", "timeout")
    (tmp_path / "job.json").write_text(text.replace("1", "2", 1))
    assert read_job(RunFolder(tmp_path)) is None


def test_list_asks_slurm_once_for_all_runs(
    submitted: RunFolder, slurm: SlurmStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.tell("job", "8\n")
    submit(monkeypatch, *SUBMIT[:-1], "b")
    slurm.tell("squeue", "7|PENDING|N/A||Resources\n8|RUNNING|2026-01-01T10:00:00|n0|None\n")
    before = len(slurm.calls)
    rows = {row["name"]: (row["state"], row["message"]) for row in json.loads(call("runs", "--json").stdout)["runs"]}
    assert rows == {"a": ("waiting", "pending (Resources)"), "b": ("starting", "running on n0")}
    assert [line.split()[0] for line in slurm.calls[before:]] == ["squeue"]


@pytest.mark.parametrize(("word", "state", "words"), [
    ("NODE_FAIL", "failed", "node failed"),
    ("OUT_OF_MEMORY", "failed", "out of memory"),
    ("CANCELLED", "stopped", "was cancelled"),
])  # fmt: skip
def test_job_that_ended_before_its_run_began_says_why(
    submitted: RunFolder, slurm: SlurmStandIn, word: str, state: str, words: str
) -> None:
    slurm.tell("squeue", f"7|{word}|2026-01-01T10:00:00|n0|None\n")
    found, message = state_of("a")
    assert found == state and words in message
    slurm.tell("squeue", "")
    before = len(slurm.calls)
    assert (state_of("a"), len(slurm.calls)) == ((found, message), before)


def test_run_that_its_time_limit_has_stopped_says_so(submitted: RunFolder, slurm: SlurmStandIn) -> None:
    append_events(submitted, make_run_started(), RunFinished(state="stopped", message="by SIGTERM"))
    write_run_record(submitted)
    slurm.tell("squeue", "7|FAILED|2026-01-01T10:00:00|n0|NonZeroExitCode\n")
    assert state_of("a") == ("stopped", "by SIGTERM")
    (submitted.path / "job.json").unlink()
    write_job(submitted, "slurm", "7")
    slurm.tell("squeue", "7|TIMEOUT|2026-01-01T10:00:00|n0|TimeLimit\n")
    assert state_of("a") == ("stopped", "slurm job 7: timeout; `gputrain resume a` continues it")


def test_slurm_that_does_not_answer_leaves_the_run_waiting(submitted: RunFolder, slurm: SlurmStandIn) -> None:
    slurm.set_tool("squeue", "echo Unable to contact slurm controller >&2; exit 1")
    slurm.ask_again()
    state, message = state_of("a")
    assert state == "waiting" and "state unknown: env: Unable to contact" in message.replace("squeue", "env")


def test_stop_cancels_a_pending_job(submitted: RunFolder, slurm: SlurmStandIn) -> None:
    result = call("stop", "a")
    assert (result.exit_code, result.stderr) == (0, "a is stopped: slurm job 7 is cancelled.\n")
    assert (slurm.calls[-1], state_of("a")) == ("scancel 7", ("stopped", "slurm job 7 was cancelled"))


def test_stop_cancels_the_job_of_a_run_that_does_not_end(
    submitted: RunFolder, slurm: SlurmStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_control, "JOB_GRACE_SECONDS", 0.0)
    slurm.tell("squeue", "7|RUNNING|2026-01-01T10:00:00|n0|None\n")
    owner = Ownership(submitted)
    assert call("stop", "a").stderr == "a is stopped: slurm job 7 is cancelled.\n"
    [request] = consume_requests(submitted.control)
    owner.release()
    assert (request.request, slurm.calls[-1]) == ("stop", "scancel 7")


def test_queue_lists_pending_jobs_with_their_reason(submitted: RunFolder, slurm: SlurmStandIn) -> None:
    assert call("queue").stdout.splitlines()[1].endswith("pending (Resources); slurm job 7")
    refused = call("queue", "hold", "a")
    assert (refused.exit_code, refused.stderr) == (2, "error: a: pending (Resources); slurm job 7\n")
    slurm.tell("squeue", "7|RUNNING|2026-01-01T10:00:00|n0|None\n")
    assert json.loads(call("queue", "--json").stdout)["queue"] == []


def test_logs_prints_the_output_of_a_job_that_has_not_begun_its_run(submitted: RunFolder) -> None:
    assert "submitted as slurm job 7" in call("logs", "a").stdout
    submitted.job_log.write_text("module: command not found\n")
    assert call("logs", "a").stdout == "module: command not found\n"
    append_events(submitted, make_run_started())
    write_run_record(submitted)
    assert "module" not in call("logs", "a").stdout


def test_second_job_of_a_run_is_refused(submitted: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has a job already: pending (Resources)" in submit(monkeypatch, *SUBMIT, "--resume", code=2)


def test_run_whose_job_is_open_starts_only_in_that_job(submitted: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("resume", "a", "--headless")
    assert (result.exit_code, "has a job already: pending (Resources)" in result.stderr) == (2, True)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with raises_problem("already-running", "a", "pending"):
        require_no_open_job(submitted, RunState.WAITING)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    require_no_open_job(submitted, RunState.WAITING)


def test_sweep_is_one_array_of_jobs(slurm: SlurmStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("sweep", "digits", "optim.lr=0.1,0.2", "--trials", "4", "--parallel", "2", "--on", "slurm", "--name", "s")
    assert "names no number of GPUs" in submit(monkeypatch, *words, code=2)
    assert submit(monkeypatch, *words, "--ngpu", "0", "--time-limit", "1h") == "s\n"
    assert {"#SBATCH --array=0-3%2", "#SBATCH --time=60"} <= {*slurm.script.splitlines()}
    assert slurm.script.splitlines()[-1].endswith(f"sweep resume s --runs-dir {Path('runs').absolute()}")
    slurm.tell("squeue", "7_[0-3%2]|PENDING|N/A||Resources\n")
    assert "s: running (pending (Resources)), 0 of 4 trials" in call("sweep", "show").stdout
    for again in (("sweep", "resume", "s"), ("sweep", "resume", "s", "--on", "slurm")):
        assert "has a job already: pending (Resources)" in submit(monkeypatch, *again, code=2)
    assert call("sweep", "stop").stderr == "s is stopped: slurm job 7 is cancelled.\n"
    assert json.loads(call("sweep", "show", "--json").stdout)["running"] is False


def test_refused_job_leaves_nothing_behind(slurm: SlurmStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.set_tool("sbatch", "echo sbatch: error: invalid account >&2; exit 1")
    assert "sbatch: error: invalid account" in submit(monkeypatch, *SUBMIT, code=2)
    assert not Path("runs").exists()


def test_print_submits_nothing(slurm: SlurmStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--nodes", "2", "--print", "--", "sh", "-c", "echo {head}")
    script = submit(monkeypatch, "run", "--on", "slurm", "--ngpu", "0", *words)
    assert "export GPUTRAIN_HEAD" in script
    assert script.endswith("--stop-signal TERM -- srun --ntasks-per-node=1 sh -c 'echo {head}'\n")
    assert not Path("runs").exists()


@pytest.mark.parametrize(("words", "refusal"), [
    (("--on", "slurm"), "auto names no number of GPUs; type --ngpu N"),
    (("--on", "slurm", "--ngpu", "0", "--copy"), "--snapshot keeps the code of a job"),
    (("--on", "lab1", "--nodes", "2"), "is for a job: --on slurm"),
    (("--nodes", "2"), "name the place with --on"),
    (("--on", "slurm", "--ngpu", "0", "--nodes", "2", "--snapshot"), "for a training whose ranks slurm starts"),
    (("--on", "slurm", "--ngpu", "0", "--begin", "now+2h"), "queue.begin: is of the queue of this host"),
])  # fmt: skip
def test_what_no_job_can_do_is_refused(
    slurm: SlurmStandIn, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], refusal: str
) -> None:
    assert refusal in submit(monkeypatch, "run", "digits", *words, code=2)
