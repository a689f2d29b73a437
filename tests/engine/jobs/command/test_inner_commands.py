"""The script behind launchers and in shells, and the parameters in the arguments of a command."""

from __future__ import annotations

import shlex

import pytest

from engine.jobs.command.inner_commands import argument_parameters
from engine.watch.parameters import Parameters


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--lr 0.1", {"lr": 0.1}),
        ("--batch-size=32 --betas 0.9 0.999", {"batch_size": 32, "betas": "[0.9, 0.999]"}),
        ("-b32", {"b": 32}),
        ("--no-amp --lr 1", {"amp": False, "lr": 1}),
        ("--shift -0.5 --low -1e-3", {"shift": -0.5, "low": -1e-3}),
        ("optim.lr=0.1 ++model.depth=3 +x=a", {"optim.lr": 0.1, "model.depth": 3, "x": "a"}),
        ("--tag a --tag b", {"tag": '["a", "b"]'}),
        ("--path /data/a=b --name run=1", {"path": "/data/a=b", "name": True, "run": 1}),
    ],
)
def test_arguments_of_script_are_typed_parameters(arguments: str, expected: Parameters) -> None:
    assert argument_parameters(["python", "train.py", *shlex.split(arguments)]) == expected


@pytest.mark.parametrize(
    "command",
    [
        "python -u -X dev train.py --lr 0.1",
        "python -m package.train --lr 0.1",
        "uv run --with torch python train.py --lr 0.1",
        "uv run --offline train.py --lr 0.1",
        "env CUDA_LAUNCH_BLOCKING=1 python3.11 train.py --lr 0.1",
        "bash -c 'cd /tmp && python train.py --lr 0.1'",
        "bash train.sh --lr 0.1",
        "yolo train lr=0.1",
        "torchrun --nproc_per_node=2 --standalone -m package.train --lr 0.1",
        "accelerate launch --num-processes 2 train.py --lr 0.1",
    ],
)
def test_options_before_the_script_are_no_parameters(command: str) -> None:
    assert argument_parameters(shlex.split(command)) == {"lr": 0.1}


@pytest.mark.parametrize(
    "command",
    ["fit --lr 0.1 -m 3", "fit -m 3 --lr 0.1", "timeout 9 fit --lr 0.1 -m 3", "bash fit.sh -c 1 --lr 0.1 -m 3"],
)
def test_options_that_look_like_those_of_a_launcher_are_parameters(command: str) -> None:
    assert {"lr": 0.1, "m": 3}.items() <= argument_parameters(shlex.split(command)).items()


def test_secrets_are_hidden() -> None:
    arguments = ["--api-key", "sk-1", "--hf_token=abc", "db.password=x", "--max-tokens", "10"]
    arguments += ["--url", "https://me:secret@host/x"]
    assert argument_parameters(["python", "train.py", *arguments]) == {
        "api_key": "***", "hf_token": "***", "db.password": "***", "max_tokens": 10, "url": "https://me:***@host/x",
    }  # fmt: skip


def test_number_and_size_of_parameters_are_bounded() -> None:
    found = argument_parameters(["python", "train.py", *(f"--a{number}=1" for number in range(5000)), "x" * 100_000])
    assert len(found) == 1000
    (long,) = argument_parameters(["python", "train.py", f"--text={'x' * 100_000}"]).values()
    assert isinstance(long, str) and len(long) == 500


def test_command_without_arguments_has_no_parameters() -> None:
    assert argument_parameters(["python", "train.py"]) == argument_parameters(["bash", "-c", "true"]) == {}
