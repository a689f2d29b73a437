"""Launcher detection, and rank info from the environment of torchrun and srun."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal

import pytest

from engine.train.distributed.rank_env import (
    RankInfo,
    detect_launcher,
    first_slurm_host,
    rank_info_from_env,
    slurm_local_world_size,
    slurm_step_port,
)
from support.messages import raises_problem

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
PORT = {"MASTER_PORT": "1234"}
STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}
SBATCH_SHELL = {
    "SLURM_JOB_ID": "4242",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu07",
    "SLURM_TASKS_PER_NODE": "4",
}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, "spawn"),
        (TORCHRUN, "env"),
        (STEP, "slurm"),
        (STEP | TORCHRUN, "env"),
        (SBATCH_SHELL, "spawn"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, "spawn"),
        ({key: value for key, value in TORCHRUN.items() if key != "MASTER_ADDR"}, "spawn"),
        (TORCHRUN | {"WORLD_SIZE": "1"}, "spawn"),
        (TORCHRUN | {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}, "env"),
    ],
    ids=[
        "nothing",
        "torchrun",
        "srun",
        "torchrun inside srun",
        "sbatch shell",
        "step of one task",
        "incomplete torchrun",
        "container of enroot",
        "torchrun of one rank",
    ],
)
def test_detect_launcher_from_environment(environment: dict[str, str], launcher: str) -> None:
    assert detect_launcher("auto", environment) == launcher


def test_detect_launcher_ignores_torchrun_around_shell() -> None:
    code = (
        "import os; from engine.train.distributed import rank_env; print(rank_env.detect_launcher('auto', os.environ))"
    )
    environment = os.environ | TORCHRUN | {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}
    # The shell runs another command afterwards, so it does not replace itself by Python.
    command = ["sh", "-c", f'"{sys.executable}" -c "{code}"; true']
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "spawn\n"


def test_rank_info_from_srun_sets_rendezvous_variables() -> None:
    rank_info, variables = rank_info_from_env("slurm", STEP)
    assert rank_info == RankInfo(4, 5, 1, 2)
    assert variables["MASTER_ADDR"] == "gpu07"
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("4", "5", "1")
    assert variables["MASTER_PORT"] == rank_info_from_env("slurm", STEP | {"SLURM_PROCID": "0"})[1]["MASTER_PORT"]


def test_slurm_step_port_differs_by_job_and_step() -> None:
    ports = {slurm_step_port(STEP | change) for change in ({}, {"SLURM_JOB_ID": "4243"}, {"SLURM_STEP_ID": "1"})}
    assert len(ports) == 3
    assert all(20000 <= port < 32000 for port in ports)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],login", "gpu07"),
        ("a1,a2", "a1"),
        ("rack-[3,5]-ib", "rack-3-ib"),
        ("n[001]", "n001"),
    ],
)
def test_first_slurm_host_expands_node_list(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


@pytest.mark.parametrize(("counts", "node", "tasks"), [("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2), ("", 0, 9)])
def test_slurm_local_world_size_expands_task_counts(counts: str, node: int, tasks: int) -> None:
    assert slurm_local_world_size({"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}, 9) == tasks


@pytest.mark.parametrize(
    ("launcher", "environment", "name"),
    [
        ("env", TORCHRUN | PORT, "RANK"),
        ("env", TORCHRUN | PORT, "LOCAL_WORLD_SIZE"),
        ("slurm", STEP, "SLURM_PROCID"),
        ("slurm", STEP, "SLURM_STEP_NUM_TASKS"),
        ("slurm", STEP, "SLURM_JOB_ID"),
        ("slurm", STEP, "SLURM_STEP_ID"),
        ("slurm", STEP, "SLURM_NODEID"),
    ],
)
@pytest.mark.parametrize("value", ["two", "-1", "\N{SUPERSCRIPT TWO}"])
def test_rank_info_names_variable_that_is_not_a_number(
    launcher: Literal["env", "slurm"], environment: dict[str, str], name: str, value: str
) -> None:
    with raises_problem("invalid-value", f"--launcher {launcher}", f"{name} ", f"'{value}'"):
        rank_info_from_env(launcher, environment | {name: value})
