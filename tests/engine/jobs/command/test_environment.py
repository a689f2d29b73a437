"""The environment of a command: what it inherits, `--env`, and the variables of torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.codec import replace
from engine.base.errors import UsageError
from engine.base.process_table import read_stat
from engine.jobs.command.environment import capture_environment, environment_options, run_options, torchrun_variables
from engine.jobs.command.process_tree import CommandProcess, Step, StopSequence
from support.commands import output_of, started, wait_for_end
from support.gputrain_command import wait_for
from support.messages import has_problem
from support.runs.command_owner import make_command
from tui.cli.run_command import CommandOptions
from tui.cli.run_command import make_command as command_of_options

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
def test_torchrun_on_one_node_chooses_a_free_port(command: list[str], tmp_path: Path) -> None:
    variables = torchrun_variables(command, {}, tmp_path)
    # The name of the host need not be known to it.
    assert (variables["PET_STANDALONE"], variables["PET_LOCAL_ADDR"]) == ("1", "127.0.0.1")


@pytest.mark.parametrize(
    "option",
    ["--nnodes=2", "--nnodes 1:2", "--rdzv_endpoint=h:1", "--rdzv-backend c10d", "--standalone", "--master_port 1"],
)
def test_torchrun_keeps_port_of_command_with_nodes_or_rendezvous(option: str, tmp_path: Path) -> None:
    command = ["torchrun", *option.split(), "train.py"]
    assert "PET_STANDALONE" not in torchrun_variables(command, {}, tmp_path)


def test_torchrun_keeps_port_of_variables(tmp_path: Path) -> None:
    environ = {"PET_RDZV_BACKEND": "c10d"}
    assert "PET_STANDALONE" not in torchrun_variables(TORCHRUN, environ, tmp_path)


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


def test_options_make_the_same_command(tmp_path: Path) -> None:
    command = replace(
        make_command(tmp_path, "fit", "--lr", "1"),
        stop_signal="SIGUSR1",
        on_resume=("--resume", "a b"),
        metrics=("m",),
        parse=("x (?P<x>.)",),
    )
    options = iter(run_options(command))
    typed: dict[str, list[str]] = {}
    for option in options:
        typed.setdefault(option, []).append(next(options))
    again = command_of_options(
        command.argv,
        CommandOptions(
            cwd=command.cwd,
            stop_signal=typed["--stop-signal"][0],
            on_resume=typed["--on-resume"][0],
            metrics=tuple(typed["--metrics"]),
            parse=tuple(typed["--parse"]),
        ),
    )
    same = {"environment": command.environment, "cwd_inode": command.cwd_inode}
    assert replace(again, **same) == command


def test_environment_options_name_what_a_command_would_not_inherit(tmp_path: Path) -> None:
    command = make_command(tmp_path, "fit", environment={"A": "1", "RANK": "3", "B": "2"}, expanded=("B",))
    assert environment_options(command) == ["--env", "RANK", "--env", "B=2"]


FAILING_RANK = """
import signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)
    print("saved", flush=True)
"""


def torchrun(folder: Path, *arguments: str) -> list[str]:
    (folder / "train.py").write_text(FAILING_RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    return [*launcher, "train.py", *arguments]


def wait_for_ranks(process: CommandProcess, folder: Path) -> None:
    wait_for(lambda: output_of(folder).count("ready") == 2, "both ranks", 120)
    groups = {status.group for pid, _ in process.members() if (status := read_stat(pid)) is not None}
    assert len(groups) == 3


@pytest.mark.nightly
def test_stop_gives_ranks_time_to_save(tmp_path: Path) -> None:
    with started(torchrun(tmp_path), tmp_path) as process:
        wait_for_ranks(process, tmp_path)
        stop = StopSequence(process)
        stop.request()
        wait_for(stop.poll, "the end of torchrun")
        assert (stop.step, stop.left_behind) == (Step.STOP, ())
    assert output_of(tmp_path).count("saved") == 2


@pytest.mark.nightly
def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    with started(torchrun(tmp_path, "stubborn"), tmp_path) as process:
        wait_for_ranks(process, tmp_path)
        members = process.members()
        stop = StopSequence(process, leftover_grace_s=0.5)
        assert next(member for member in members if member.pid == process.pid).send_signal(signal.SIGKILL)
        wait_for(stop.poll, "the end of the ranks")
        assert (process.poll(), len(stop.left_behind)) == (-signal.SIGKILL, 2)
        wait_for_end(members)
