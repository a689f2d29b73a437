"""Slurm: the script of a job, what it asks of the cluster, and the words of its states."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.base.files import settings_file
from engine.runs.batch.engine import BatchError, JobPhase, JobRequest, JobState
from engine.runs.batch.slurm import Slurm
from support.servers.slurm_stand_in import SlurmStandIn

REQUEST = JobRequest("a-1", Path("/work"), Path("/work/log"), "gputrain run", gpus=2, time_limit_min=90.5)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmStandIn:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    return SlurmStandIn(tmp_path / "slurm", monkeypatch)


@pytest.mark.parametrize(
    ("fields", "options", "end"),
    [
        (
            {},
            {"--gres=gpu:2", "--cpus-per-task=32", "--time=91", "--requeue", "--signal=B:USR1@60"},
            "exec gputrain run",
        ),
        (
            {"nodes": 2, "tasks_per_node": 2},
            {"--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=16", "--signal=USR1@60"},
            "exec srun gputrain run",
        ),
        (
            {"array_size": 4, "array_limit": 2},
            {"--array=0-3%2"},
            'export GPUTRAIN_TASK="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"\nexec gputrain run',
        ),
    ],
    ids=["command", "ranks on each node", "array"],
)
def test_script_asks_for_what_the_job_needs(
    slurm: SlurmStandIn, fields: dict[str, int], options: set[str], end: str
) -> None:
    script = Slurm().script(replace(REQUEST, **fields))  # type: ignore[arg-type]
    assert {f"#SBATCH {option}" for option in options} <= {*script.splitlines()}
    assert script.endswith(f"\n{end}\n")


def test_script_has_settings_and_typed_options_last(slurm: SlurmStandIn) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text("slurm: {partition: long, account: lab, setup: [module load cuda]}")
    script = Slurm().script(replace(REQUEST, options=("--account=my lab",)))
    assert "sinfo -h -p long" in slurm.calls[0]
    assert [line for line in script.splitlines() if "account" in line] == [
        "#SBATCH --account=lab",
        "#SBATCH --account='my lab'",
    ]
    assert script.endswith("module load cuda\nexec gputrain run\n")


@pytest.mark.parametrize(
    ("gres", "words"),
    [
        ("(null)", "Slurm knows no GPUs.*--ngpu 0 trains on the CPU"),
        ("gpu:1,gpu:a100:2(S:0),shard:9", "has nodes with 3 GPUs at most; type --ngpu 3 or less"),
    ],
)
def test_missing_gpus_are_refused(slurm: SlurmStandIn, gres: str, words: str) -> None:
    slurm.tell("sinfo", f"{gres}|8\n")
    with pytest.raises(UsageError, match=words):
        Slurm().script(replace(REQUEST, gpus=4))


def test_option_that_is_no_option_is_refused(slurm: SlurmStandIn) -> None:
    with pytest.raises(UsageError, match="'x\\\\\\\\nrm' is no option of sbatch"):
        Slurm().script(replace(REQUEST, options=("x\nrm",)))


@pytest.mark.parametrize(
    ("row", "phase", "words"),
    [
        ("PENDING|N/A||Resources", JobPhase.PENDING, "pending (Resources)"),
        ("RUNNING|2026-01-01T10:00:00|n[0-1]|None", JobPhase.RUNNING, "running on n[0-1]"),
        ("NODE_FAIL|2026-01-01T10:00:00|n0|None", JobPhase.KILLED, "node failed"),
        ("OUT_OF_MEMORY", JobPhase.KILLED, "out of memory"),
        ("TIMEOUT|2026-01-01T10:00:00|n0|None", JobPhase.KILLED, "timeout"),
        ("FAILED|2026-01-01T10:00:00|n0|NonZeroExitCode", JobPhase.FAILED, "failed"),
        ("CANCELLED by 0", JobPhase.CANCELLED, "cancelled"),
    ],
)
def test_states_are_in_words_of_slurm(slurm: SlurmStandIn, row: str, phase: JobPhase, words: str) -> None:
    slurm.tell("squeue", f"7|{row}\n")
    state = Slurm().states(None)["7"]
    assert (state.phase, state.words) == (phase, words)


@pytest.mark.parametrize(
    ("rows", "phase"),
    [
        ("7_[2-3%2]|PENDING|N/A||JobArrayTaskLimit\n7_0|COMPLETED\n7_1|RUNNING", JobPhase.RUNNING),
        ("7_[2-3%2]|PENDING|N/A||JobArrayTaskLimit\n7_0|FAILED", JobPhase.PENDING),
        ("7_0|COMPLETED\n7_1|FAILED\n7_2|COMPLETED", JobPhase.FAILED),
    ],
)
def test_array_is_one_job(slurm: SlurmStandIn, rows: str, phase: JobPhase) -> None:
    slurm.tell("squeue", f"{rows}\n")
    states = Slurm().states(None)
    assert ([*states], states["7"].phase) == (["7"], phase)


def test_pending_job_says_when_it_starts(slurm: SlurmStandIn) -> None:
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 40 * 86400))
    slurm.tell("squeue", f"7|PENDING|{start}||Priority\n")
    assert Slurm().states(None)["7"].words == f"pending (Priority), starts about {start[:10]} {start[11:16]}"


def test_ended_jobs_come_from_sacct_where_it_exists(slurm: SlurmStandIn) -> None:
    assert Slurm().states(0.0) == {}
    slurm.tell("sacct", "7|NODE_FAIL|2026-01-01T10:00:00\n")
    assert Slurm().states(0.0)["7"] == JobState(JobPhase.KILLED, "node failed")
    assert Slurm().states(None) == {}


def test_missing_slurm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BatchError, match="there is no sbatch on this host; the login nodes of a cluster have it"):
        Slurm().submit(tmp_path, REQUEST)
