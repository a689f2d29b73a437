"""Slurm: the script of a job, `sbatch`, `squeue`, `sacct` where it exists, and `scancel`.

Only options that Slurm 17 has, too: no `--json`, and no accounting is needed. What a job does at a requeue is written
in `engine/jobs/launch/README.md`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from engine.base.errors import UsageError
from engine.base.text import printable
from engine.runs.batch.engine import BatchError, JobPhase, JobRequest, JobState, run_tool

WARNING_SECONDS = 60  # before the time limit: Slurm sends it up to 60 s earlier
_KILLED = {
    "BOOT_FAIL": "boot failed", "DEADLINE": "deadline", "NODE_FAIL": "node failed",
    "OUT_OF_MEMORY": "out of memory", "PREEMPTED": "preempted", "REVOKED": "revoked", "TIMEOUT": "timeout",
}  # fmt: skip
_PENDING = ("CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_NODE_LINES = (
    "export GPUTRAIN_NODES=$SLURM_JOB_NUM_NODES GPUTRAIN_PORT=$((20000 + SLURM_JOB_ID % 10000))",
    'GPUTRAIN_HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) && export GPUTRAIN_HEAD',
)
_ARRAY_LINE = 'export GPUTRAIN_TASK="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
# Of the jobs of an array, the first of these says what the array is.
_MOST_TELLING = tuple(map(JobPhase, ("running", "pending", "killed", "failed", "cancelled", "completed")))
_TIME = "%Y-%m-%dT%H:%M:%S"
# The user's own format of times is for the user.
_CLEAN = ("env", "SLURM_TIME_FORMAT=standard")


class Slurm:
    """The Slurm cluster of this host."""

    job_variable = "SLURM_JOB_ID"
    requeues = True
    rank_gpus = ""

    def __init__(self, address: str = "") -> None:
        if address:
            raise BatchError(f"slurm has no address, but {printable(address)!r} follows it; type --on slurm")

    def starts_ranks(self, nodes: int) -> bool:
        # Of one node, gputrain starts them.
        return nodes > 1

    def script(self, request: JobRequest) -> str:
        # A list of runs needs no pydantic.
        from engine.config.settings import read_settings

        settings, count = read_settings().slurm, max(request.tasks_per_node, 1)
        partition = request.partition or settings.partition
        cores = request.cores
        if request.gpus:
            cores = max(cores, _share_of_node(request.gpus, partition) // count)
        options = [
            f"--job-name={request.name}",
            f"--chdir={request.folder}",
            f"--output={request.log}",
            "--open-mode=append",
            "--export=ALL",
            "--requeue",
            # Of several tasks, each gets the warning.
            f"--signal={'' if request.tasks_per_node else 'B:'}USR1@{WARNING_SECONDS}",
            f"--nodes={request.nodes}",
            f"--ntasks-per-node={count}",
            f"--cpus-per-task={cores}",
        ]
        named = {"gres": f"gpu:{request.gpus}" * (request.gpus > 0), "partition": partition}
        named |= {"account": settings.account, "time": str(math.ceil(request.time_limit_min) or "")}
        if request.array_size:
            named["array"] = f"0-{request.array_size - 1}%{request.array_limit}"
        options += [f"--{name}={value}" for name, value in named.items() if value]
        run = f"srun {request.command}" if request.tasks_per_node else request.command
        lines = [
            "#!/bin/bash",
            # The last one of two options counts.
            *(f"#SBATCH {_directive(option)}" for option in (*options, *request.options)),
            *request.setup,
            *settings.setup,
            *(_NODE_LINES if request.names_nodes else ()),
            *[_ARRAY_LINE] * (request.array_size > 0),
            f"exec {run}",
        ]
        return "\n".join(lines) + "\n"

    def submit(self, script: Path, request: JobRequest) -> str:
        # Of a federation, the cluster follows behind a semicolon.
        job = run_tool("sbatch", "--parsable", str(script)).strip().partition(";")[0]
        if not job.isdigit():
            raise BatchError(f"sbatch answers with {printable(job)[:100]!r} and no ID of a job")
        return job

    def states(self, since: float | None) -> Mapping[str, JobState]:
        found = dict[str, JobState]()
        if since is not None:
            day = time.strftime("%Y-%m-%d", time.localtime(since - 86400))
            # Without accounting, or without sacct, there is only what squeue still knows.
            with suppress(BatchError):
                fields = "--format=JobID,State,Start"
                lines = run_tool(*_CLEAN, "sacct", "-n", "-X", "-P", "-u", _user(), "-S", day, fields)
                found |= _read_states(line.split("|") for line in lines.splitlines())
        lines = run_tool(*_CLEAN, "squeue", "-h", "-t", "all", "-u", _user(), "-o", "%i|%T|%S|%N|%r")
        return found | _read_states(line.split("|", 4) for line in lines.splitlines())

    def cancel(self, job: str) -> None:
        # Slurm sends SIGTERM, at which a run saves a checkpoint, and SIGKILL after its KillWait.
        run_tool("scancel", job)

    def per_node(self, words: Sequence[str]) -> list[str]:
        return ["srun", "--ntasks-per-node=1", *words]


def _user() -> str:
    return str(os.geteuid())


def _directive(option: str) -> str:
    if not option.startswith("-") or not option.isprintable():
        advice = "type it as in --slurm=--account=NAME"
        raise UsageError.one("--slurm", f"{printable(option)!r} is no option of sbatch", advice, code="invalid-value")
    name, sign, value = option.partition("=")
    return f"{name}{sign}{shlex.quote(value) if value else ''}"


def _share_of_node(gpus: int, partition: str) -> int:
    """Return how many cores of a node go with `gpus` of its GPUs, by `sinfo`. Raises UsageError if no node has them."""
    where = ["-p", partition] if partition else []
    nodes = list[tuple[int, int]]()
    for line in run_tool("sinfo", "-h", *where, "-o", "%G|%c").splitlines():
        gres, _, cores = line.partition("|")
        number = re.match(r"\d+", cores.strip())
        nodes.append((_count_gpus(gres), int(number[0]) if number else 1))
    most, place = max((found for found, _ in nodes), default=0), f"partition {partition}" if partition else "Slurm"
    if most < gpus:
        has = f"has nodes with {most} GPUs at most" if most else "knows no GPUs (`sinfo -o %G`)"
        advice = f"type --ngpu {most} or less, and --nodes for more" if most else "--ngpu 0 trains on the CPU"
        raise UsageError.one("--ngpu", f"{place} {has}", advice, code="too-few-gpus")
    return min(cores * gpus // found for found, cores in nodes if found >= gpus)


def _count_gpus(gres: str) -> int:
    """Return the GPUs of a node, as in `gpu:2` or `gpu:a100:4(S:0-1),shard:8`."""
    found = [each.split(":") for each in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return sum(int(last) if (last := words[-1]).isdigit() else 1 for words in found if words[0] == "gpu")


def _read_states(rows: object) -> dict[str, JobState]:
    """Return the states of rows of ID, state, time, nodes and reason; older versions of Slurm may leave fields out. The
    ID of a job of an array is `7_3`, that of those which wait `7_[4-9%2]`."""
    states = dict[str, JobState]()
    for row in rows:  # type: ignore[attr-defined]
        job, word, start, nodes, reason = map(str.strip, [*row, "", "", "", ""][:5])
        state = _read_state(word.split(" ")[0], start, printable(nodes), printable(reason))
        array = job.partition("_")[0]
        states[array] = min(states.get(array, state), state, key=lambda each: _MOST_TELLING.index(each.phase))
    return states


def _read_state(word: str, start: str, nodes: str, reason: str) -> JobState:
    try:
        started_at = time.mktime(time.strptime(start, _TIME))
    except ValueError:
        started_at = 0.0
    if word in _PENDING:
        why = f"pending ({reason})" if reason not in ("", "None") else "pending"
        if started_at <= time.time():
            return JobState(JobPhase.PENDING, why)
        is_today = time.localtime(started_at)[:3] == time.localtime()[:3]
        when = time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", time.localtime(started_at))
        return JobState(JobPhase.PENDING, f"{why}, starts about {when}")
    if word in ("COMPLETED", "CANCELLED", "FAILED"):
        return JobState(JobPhase(word.casefold()), word.casefold())
    if word in _KILLED:
        return JobState(JobPhase.KILLED, _KILLED[word])
    return JobState(JobPhase.RUNNING, f"{word.casefold()} on {nodes}" if nodes else word.casefold(), started_at)
