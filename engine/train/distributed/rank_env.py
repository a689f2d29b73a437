"""Detect the launcher (gputrain, torchrun or srun) and read rank and world size from its environment variables.

`engine.jobs.launch` calls it before anything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.base.errors import UsageError

Launcher = Literal["spawn", "env", "slurm"]
TORCHRUN_RUN_ID = "TORCHELASTIC_RUN_ID"
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@dataclass(frozen=True)
class RankInfo:
    """Position of one rank among all ranks and among those of its node."""

    rank: int
    """Rank, counted from 0 over all nodes."""
    world_size: int
    """Number of ranks on all nodes."""
    local_rank: int
    """Rank, counted from 0 on this node."""
    local_world_size: int
    """Number of ranks on this node."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which torchrun tells a rank its position."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


def detect_launcher(requested: Launcher | Literal["auto"], environ: Mapping[str, str]) -> Launcher:
    """Return the launcher: as requested, or detected from the environment.

    torchrun is detected if all `TORCHRUN_VARIABLES` are set, srun if the job step has several tasks. SLURM_PROCID alone
    is not enough: the shell of an sbatch script has it too. A world of one rank counts only as the child of torchrun,
    whose elastic worlds shrink: the PyTorch hook of enroot sets the variables for every container.
    """
    if requested != "auto":
        return requested
    if all(environ.get(name) for name in TORCHRUN_VARIABLES):
        if environ["WORLD_SIZE"] != "1" or _is_torchrun_child(environ):
            return "env"
        return "spawn"
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if environ.get("SLURM_STEP_ID") and tasks.isdecimal() and int(tasks) > 1:
        return "slurm"
    return "spawn"


def _is_torchrun_child(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this process, and not a shell or script that torchrun started."""
    if TORCHRUN_RUN_ID not in environ:
        return False
    # Takes 15 ms to import.
    import psutil

    try:
        return TORCHRUN_RUN_ID not in psutil.Process(os.getppid()).environ()
    except psutil.Error:
        return True


def rank_info_from_env(launcher: Launcher, environ: Mapping[str, str]) -> tuple[RankInfo, dict[str, str]]:
    """Return the rank info set by torchrun or srun, and the variables that torch's rendezvous needs in addition.

    Raises UsageError if a variable is missing or not a number.
    """
    if launcher == "env":
        rank, world = _int_from_env(environ, "RANK", launcher), _int_from_env(environ, "WORLD_SIZE", launcher)
        local = _int_from_env(environ, "LOCAL_RANK", launcher)
        _int_from_env(environ, "MASTER_PORT", launcher)
        return RankInfo(rank, world, local, _int_from_env(environ, "LOCAL_WORLD_SIZE", launcher, default=world)), {}
    rank, local = _int_from_env(environ, "SLURM_PROCID", launcher), _int_from_env(environ, "SLURM_LOCALID", launcher)
    world_variable = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world = _int_from_env(environ, world_variable, launcher)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    address = environ.get("MASTER_ADDR") or (first_slurm_host(nodes) if nodes else None)
    if address is None:
        raise UsageError.one(
            "--launcher slurm",
            "SLURM_STEP_NODELIST is not set; start with srun, or set MASTER_ADDR",
            code="missing-value",
        )
    rank_info = RankInfo(rank, world, local, slurm_local_world_size(environ, world))
    port = environ.get("MASTER_PORT") or str(slurm_step_port(environ))
    return rank_info, {"MASTER_ADDR": address, "MASTER_PORT": port, **rank_info.variables()}


def _int_from_env(environ: Mapping[str, str], name: str, launcher: Launcher, default: int | None = None) -> int:
    """Return the integer in an environment variable, or ``default`` if it is not set. Raises UsageError if it is
    invalid."""
    value = environ.get(name, "")
    if not value and default is not None:
        return default
    # isdigit() also accepts superscripts, which int() refuses.
    if not value.isdecimal():
        command = "torchrun" if launcher == "env" else "srun"
        problem = f"must be a non-negative integer, not {value!r}" if value else "is not set"
        raise UsageError.one(
            f"--launcher {launcher}",
            f"{name} {problem}; start with {command}, or omit --launcher",
            code="invalid-value",
        )
    return int(value)


def first_slurm_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: gpu07 for `gpu[07-09,12],login`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", node_list)
    if match is None:
        return node_list
    prefix, ranges, suffix = match[1], match[2], match[3]
    return prefix + (re.split(r"[-,]", ranges)[0] if ranges else "") + suffix


def slurm_step_port(environ: Mapping[str, str]) -> int:
    """Return the rendezvous port of a Slurm step.

    All tasks compute the same port from job and step ID, and other steps are unlikely to share it. It is below Linux's
    ephemeral ports. Raises UsageError if an ID is not a number.
    """
    job, step = (_int_from_env(environ, name, "slurm", default=0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 20000 + (job * 31 + step) % 12000


def slurm_local_world_size(environ: Mapping[str, str], world_size: int) -> int:
    """Return the number of tasks on this node, from `SLURM_STEP_TASKS_PER_NODE` such as `4(x2),3`; ``world_size`` if it
    is not set. Raises UsageError if SLURM_NODEID is not a number."""
    counts: list[int] = []
    for part in (environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _int_from_env(environ, "SLURM_NODEID", "slurm", default=0)
    return counts[node] if node < len(counts) else world_size
