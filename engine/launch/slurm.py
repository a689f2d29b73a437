"""A job of SLURM that puts itself back into the queue."""

from __future__ import annotations

import os
import subprocess

SCONTROL_TIMEOUT_SECONDS = 30


def slurm_job_id() -> str | None:
    """The number of the job that this process is in."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return job if job.isdigit() else None


def requeue(job_id: str) -> str | None:
    """Ask SLURM to put the job back into the queue, which ends it here; why that could not be done, None where it was.
    Everything that is to be kept must be kept by then."""
    try:
        done = subprocess.run(  # noqa: S603 (the job is a number)
            ["scontrol", "requeue", job_id],  # noqa: S607 (where SLURM lies is the machine's affair)
            capture_output=True,
            text=True,
            timeout=SCONTROL_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"job {job_id} could not be put back into the queue: {error}"
    if done.returncode != 0:
        why = " ".join(done.stderr.split()) or f"scontrol ended with {done.returncode}"
        return f"job {job_id} could not be put back into the queue: {why}"
    return None
