"""Requeue the Slurm job of a run before its time limit (`run.requeue`). Both trainings and commands do."""

from __future__ import annotations

import os
import signal
import subprocess

from engine.config.schema import Config
from engine.utils.errors import Problem
from engine.utils.exits import exit_status

SCONTROL_TIMEOUT_SECONDS = 30


def slurm_job_id() -> str | None:
    """Return the ID of the Slurm job that this process runs in; None outside of Slurm."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return job if job.isdigit() else None


def requeue_warnings(config: Config) -> list[Problem]:
    """Return that `run.requeue` has no effect, unless this process is in a Slurm job."""
    if not config.run.requeue or slurm_job_id() is not None:
        return []
    return [Problem("", "run.requeue=true has no effect: this is not a Slurm job", code="no-effect")]


def requeue(job_id: str) -> Problem | None:
    """Requeue a job. Slurm then ends its processes, so save everything before. Return a problem, or None."""
    try:
        done = subprocess.run(  # noqa: S603 (the job ID is a number)
            ["scontrol", "requeue", job_id],  # noqa: S607 (Slurm is on the PATH)
            capture_output=True,
            text=True,
            timeout=SCONTROL_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Problem("", f"job {job_id} could not be requeued: {error}", code="library-failed")
    # Slurm ends the processes of the job, and scontrol is one of them.
    if done.returncode not in (0, -signal.SIGTERM):
        reason = " ".join(done.stderr.split()) or f"scontrol {exit_status(done.returncode)}"
        return Problem("", f"job {job_id} could not be requeued: {reason}", code="library-failed")
    return None
