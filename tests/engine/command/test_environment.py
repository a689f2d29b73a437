"""The environment of a command: what it inherits, `--env`, and the variables of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.command.environment import capture_environment, torchrun_variables
from engine.utils.errors import UsageError
from support.messages import has_problem

TORCHRUN = ["torchrun", "--nproc-per-node", "2", "train.py"]


def test_capture_environment_leaves_out_rank_of_this_process_and_own_variables() -> None:
    own = {
        "HOME": "/home/ann", "SLURM_JOB_ID": "7", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h",
        "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "GPUTRAIN_RUN_ID": "y", "GPUTRAIN_METRICS": "z",
        "GPUTRAIN_RUNS": "/runs", "PET_LOG_DIR": "/outer",
    }  # fmt: skip
    assert capture_environment(own) == {"HOME": "/home/ann", "SLURM_JOB_ID": "7", "GPUTRAIN_RUNS": "/runs"}


def test_capture_environment_keeps_torchrun_variables_of_user() -> None:
    assert capture_environment({"PET_TEE": "0"}) == {"PET_TEE": "0"}


def test_capture_environment_takes_settings_and_named_variables() -> None:
    own = {"HF_TOKEN": "s3cr3t", "MASTER_PORT": "1"}
    captured = capture_environment(own, ["A=b=c", "EMPTY=", "HF_TOKEN", "MASTER_PORT"])
    assert captured == {"HF_TOKEN": "s3cr3t", "A": "b=c", "EMPTY": "", "MASTER_PORT": "1"}


def test_capture_environment_reports_every_bad_setting() -> None:
    with pytest.raises(UsageError) as caught:
        capture_environment({}, ["MISSING", "=x", "CUDA_VISIBLE_DEVICES=0"])
    problems = caught.value.problems
    assert has_problem(problems, "missing-value", "--env", "MISSING")
    assert has_problem(problems, "invalid-value", "--env", "=x")
    assert has_problem(problems, "conflict", "--env", "CUDA_VISIBLE_DEVICES", "--gpus")


def test_torchrun_variables_give_each_rank_a_log(tmp_path: Path) -> None:
    assert torchrun_variables(["./train.sh"], {}, tmp_path / "torchrun") == {
        "PET_LOG_DIR": str(tmp_path / "torchrun"),
        "PET_TEE": "3",
    }


def test_torchrun_variables_of_user_win(tmp_path: Path) -> None:
    environ = {"PET_LOG_DIR": "/mine", "PET_TEE": "0", "PET_MASTER_PORT": "7"}
    assert torchrun_variables(TORCHRUN, environ, tmp_path) == {}


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "train.py"],
        ["torchrun", "--nproc_per_node=1", "train.py"],
        ["torchrun", "--nproc-per-node=2", "--redirects", "3", "train.py"],
        ["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "-r", "3", "train.py"],
    ],
)
def test_torchrun_output_is_not_echoed_from_files_of_single_or_redirected_rank(
    command: list[str], tmp_path: Path
) -> None:
    assert "PET_TEE" not in torchrun_variables(command, {}, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        TORCHRUN,
        ["torchrun", "--nnodes=1", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py", "--nnodes", "2"],
        ["env", "A=b", "venv/bin/torchrun", "train.py"],
        ["sh", "-c", "cd . && exec torchrun train.py"],
    ],
)
def test_torchrun_on_one_node_gets_a_free_port(command: list[str], tmp_path: Path) -> None:
    found = torchrun_variables(command, {}, tmp_path)
    assert 1024 < int(found["PET_MASTER_PORT"]) < 1 << 16


@pytest.mark.parametrize(
    "option",
    ["--nnodes=2", "--nnodes 1:2", "--rdzv_endpoint=h:1", "--rdzv-backend c10d", "--standalone", "--master_port 1"],
)
def test_torchrun_keeps_port_of_command_with_nodes_or_rendezvous(option: str, tmp_path: Path) -> None:
    command = ["torchrun", *option.split(), "train.py"]
    assert "PET_MASTER_PORT" not in torchrun_variables(command, {}, tmp_path)


def test_torchrun_keeps_port_of_variables(tmp_path: Path) -> None:
    environ = {"PET_RDZV_BACKEND": "c10d"}
    assert "PET_MASTER_PORT" not in torchrun_variables(TORCHRUN, environ, tmp_path)


RANK = """
import os, sys
print("out", os.environ["RANK"], os.environ["MASTER_PORT"], flush=True)
sys.exit(os.environ["RANK"] == "1" and "error of rank 1")
"""


def run_torchrun(folder: Path, *options: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """Start two ranks with the variables of a command, and return the logs that torchrun has written."""
    (folder / "train.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options, "train.py"]
    environ = os.environ | torchrun_variables(command, variables, folder / "torchrun") | variables
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
    return done, sorted(folder.rglob("torchrun/*/attempt_0/*/*.log"))


@pytest.mark.nightly
def test_torchrun_writes_log_of_each_rank_and_prints_it_once(tmp_path: Path) -> None:
    done, logs = run_torchrun(tmp_path, PET_MASTER_PORT="29411")
    assert [f"{path.parent.name}/{path.name}" for path in logs] == [
        "0/stderr.log", "0/stdout.log", "1/stderr.log", "1/stdout.log",
    ]  # fmt: skip
    assert logs[1].read_text() == "out 0 29411\n"
    assert "error of rank 1" in logs[2].read_text()
    assert done.stdout.count("out 0") == 1
    assert done.stderr.count("]:error of rank 1") == 1
