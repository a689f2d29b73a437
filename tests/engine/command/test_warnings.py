"""Warnings before a command starts, by its arguments."""

from __future__ import annotations

import shlex

import pytest

from engine.command.warnings import command_warnings
from engine.utils.errors import Problem
from support.messages import has_problem


def warnings_of(typed: str, gpus: int = 2) -> list[Problem]:
    return command_warnings(shlex.split(typed), gpus)


@pytest.mark.parametrize(
    ("typed", "code", "location", "advice"),
    [
        ("python train.py --device 0,1", "gpu-override", "--device 0,1", "{ids}"),
        ("python train.py trainer.devices=[0,1]", "gpu-override", "trainer.devices=[0,1]", "{ids}"),
        ("torchrun --nproc_per_node=4 train.py", "conflict", "--nproc_per_node=4", "{gpus}"),
        ("sh -c 'CUDA_VISIBLE_DEVICES=0 python t.py'", "gpu-override", "CUDA_VISIBLE_DEVICES=0", "leave it out"),
        ("bash -lc 'export CUDA_VISIBLE_DEVICES=1\nt.py'", "gpu-override", "CUDA_VISIBLE_DEVICES=1", "leave it out"),
    ],
)
def test_arguments_that_choose_gpus_again_are_reported(typed: str, code: str, location: str, advice: str) -> None:
    assert has_problem(warnings_of(typed), code, location, advice) and len(warnings_of(typed)) == 1


@pytest.mark.parametrize(
    "typed",
    [
        "torchrun --nproc-per-node {gpus} train.py --lr 0.1",
        "yolo classify train device={ids}",
        "python train.py --devices 2 --device cuda:1 --gpus all",
        "env CUDA_VISIBLE_DEVICES= python plot.py",
        "sh -c 'setsid -w python a.py & setsid --ctty --wait python b.py & wait'",
        "python train.py --env screen --mode docker run",
        "docker build .",
        "sh -c 'echo \"unbalanced'",
    ],
)
def test_ordinary_commands_have_no_warning(typed: str) -> None:
    assert warnings_of(typed) == []


@pytest.mark.parametrize(
    ("typed", "code", "location"),
    [
        ("sudo docker run image python train.py --device 0", "leaves-run", "docker"),
        ("tmux new -d python train.py", "leaves-run", "tmux"),
        ("sh -c 'sbatch a.sh; sbatch b.sh'", "leaves-run", "sbatch"),
        ("setsid python train.py", "leaves-run", "setsid"),
        ("sh -c 'cd x; python train.py &'", "leaves-run", "&"),
        ("ssh host python train.py", "leaves-run", "ssh"),
        ("nice -n 10 nohup python train.py", "wrapper-breaks-run", "nohup"),
    ],
)
def test_programs_that_leave_the_run_are_reported_once(typed: str, code: str, location: str) -> None:
    [problem] = warnings_of(typed)
    assert has_problem([problem], code, location) and problem.advice


def test_placeholders_of_gpus_on_cpu_are_reported() -> None:
    problems = warnings_of("torchrun --nproc-per-node {gpus} train.py", gpus=0)
    assert has_problem(problems, "no-gpu", "{gpus}", "so this is 0")
    assert warnings_of("echo {run} {folder} {}", gpus=0) == []


def test_warning_escapes_arguments() -> None:
    [problem] = warnings_of("python train.py '--gpu_ids=0,\n1'")
    assert str(problem).isprintable()


@pytest.mark.parametrize(("signal", "is_passed_on"), [("SIGINT", False), ("SIGUSR2", True)])
def test_stop_signal_that_srun_does_not_pass_on_is_reported(signal: str, is_passed_on: bool) -> None:
    warnings = command_warnings(["srun", "-N2", "python", "train.py"], 0, signal)
    assert has_problem(warnings, "wrapper-breaks-run", "srun", "--stop-signal") is not is_passed_on
