"""Requeue the Slurm job of a run before its time limit (`run.requeue`). Both trainings and commands do."""

from __future__ import annotations

import os
import signal
import subprocess

from engine.config.schema import Config
from engine.utils.errors import Problem
from engine.utils.exits import exit_status
from engine.utils.text import printable

SCONTROL_TIMEOUT_SECONDS = 20  # less than Slurm's default KillWait of 30 s


def slurm_job_id() -> str | None:
    """Return the ID of the Slurm job that this process runs in; None outside of Slurm."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return job if job.isdigit() else None


def requeue_warnings(config: Config) -> list[Problem]:
    """Return that `run.requeue` has no effect, unless this process is in a Slurm job."""
    if not config.run.requeue or slurm_job_id() is not None:
        return []
    return [Problem("", "run.requeue=true has no effect: this is not a Slurm job", code="no-effect")]


def requeue_clause() -> str:
    """Requeue the Slurm job of this process, and return what became of it, behind a semicolon; "" outside of Slurm.

    Slurm then ends the processes of the job, and kills them after its `KillWait`: save everything else before."""
    if (job := slurm_job_id()) is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 (the job ID is a number)
            ["scontrol", "requeue", job],  # noqa: S607 (Slurm is on the PATH)
            capture_output=True,
            text=True,
            timeout=SCONTROL_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _not_requeued(job, str(error))
    # Slurm ends the processes of the job, and scontrol is one of them.
    if done.returncode in (0, -signal.SIGTERM):
        return f"; job {job} is requeued"
    return _not_requeued(job, " ".join(done.stderr.split()) or f"scontrol {exit_status(done.returncode)}")


def _not_requeued(job: str, reason: str) -> str:
    return f"; job {job} could not be requeued ({printable(reason)}); submit its script again to continue the run"
