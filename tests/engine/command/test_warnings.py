"""Warnings before a command starts, by its arguments and its script."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from engine.command.warnings import MAX_SCRIPT_BYTES, command_warnings
from engine.utils.errors import Problem
from support.messages import has_problem

TRAINER = "from transformers import (\n    AutoModel,\n    Trainer,\n)\n"


def warnings_of(typed: str, gpus: int = 2, cwd: Path = Path("/")) -> list[Problem]:
    return command_warnings(shlex.split(typed), gpus, cwd)


@pytest.mark.parametrize(
    ("typed", "code", "location", "advice"),
    [
        ("yolo classify train device=0", "gpu-override", "device=0", "{ids}"),
        ("python train.py --device 0,1", "gpu-override", "--device 0,1", "leave it out"),
        ("python train.py --gpu_ids=0", "gpu-override", "--gpu_ids=0", "leave it out"),
        ("python train.py trainer.devices=[0,1]", "gpu-override", "trainer.devices=[0,1]", "leave it out"),
        ("python train.py --device cuda:2", "out-of-range", "--device cuda:2", "--gpus"),
        ("python train.py --devices 4", "conflict", "--devices 4", "{gpus}"),
        ("torchrun --nproc_per_node=4 train.py", "conflict", "--nproc_per_node=4", "{gpus}"),
        ("accelerate launch --num_processes 1 train.py", "conflict", "--num_processes 1", "{gpus}"),
        ("accelerate launch --gpu_ids 0,1 train.py", "gpu-override", "--gpu_ids 0,1", "leave it out"),
        ("deepspeed --include localhost:0 train.py", "gpu-override", "--include localhost:0", "localhost:{ids}"),
        ("deepspeed --num_gpus=2 train.py", "gpu-override", "--num_gpus=2", "localhost:{ids}"),
        ("docker run --gpus all image", "gpu-override", "--gpus all", "{uuids}"),
        ("env CUDA_VISIBLE_DEVICES=0 python train.py", "gpu-override", "CUDA_VISIBLE_DEVICES=0", "leave it out"),
        ("sh -c 'CUDA_VISIBLE_DEVICES=0 python t.py'", "gpu-override", "CUDA_VISIBLE_DEVICES=0", "leave it out"),
        ("bash -lc 'export CUDA_VISIBLE_DEVICES=1\nt.py'", "gpu-override", "CUDA_VISIBLE_DEVICES=1", "leave it out"),
    ],
)
def test_arguments_that_choose_gpus_again_are_reported(typed: str, code: str, location: str, advice: str) -> None:
    [problem] = [warning for warning in warnings_of(typed) if warning.code != "leaves-run"]
    assert has_problem([problem], code, location, advice)


@pytest.mark.parametrize(
    "typed",
    [
        "torchrun --nproc-per-node {gpus} train.py --lr 0.1",
        "torchrun --nproc-per-node gpu train.py",
        "yolo classify train device={ids}",
        "python train.py --devices 2 --accelerator gpu",
        "python train.py --device cuda",
        "python train.py --device cuda:1",
        "python train.py --gpus all",
        "deepspeed --include localhost:{ids} train.py -e 10",
        "python prepare.py --num_processes 16",
        "env CUDA_VISIBLE_DEVICES= python plot.py",
        "accelerate launch --gpu_ids all --num_processes {gpus} train.py",
        "env CUDA_VISIBLE_DEVICES={uuids} vllm serve model",
        "sh -c 'tensorboard --logdir runs & python train.py'",
        "sh -c 'python a.py & python b.py & wait'",
        "python train.py --env screen --mode docker run",
        "docker build .",
        "setsid --wait python train.py",
        "conda run --no-capture-output -n env python train.py",
        "sh -c 'echo \"unbalanced'",
        "python -m http.server",
        "./run python train.py --lr 0.1",
    ],
)
def test_ordinary_commands_have_no_warning(typed: str) -> None:
    assert warnings_of(typed) == []


@pytest.mark.parametrize(
    ("typed", "code", "location"),
    [
        ("docker run image python train.py --device 0", "leaves-run", "docker run"),
        ("sudo podman run image", "leaves-run", "podman run"),
        ("tmux new -d python train.py", "leaves-run", "tmux"),
        ("sbatch job.sh", "leaves-run", "sbatch"),
        ("setsid python train.py", "leaves-run", "setsid"),
        ("sh -c 'cd x; python train.py &'", "leaves-run", "&"),
        ("ssh host python train.py", "leaves-run", "ssh"),
        ("nohup python train.py", "wrapper-breaks-run", "nohup"),
        ("conda run -n env python train.py", "wrapper-breaks-run", "conda run"),
        ("nice -n 10 timeout -k 5 60 conda run python train.py", "wrapper-breaks-run", "conda run"),
    ],
)
def test_programs_that_leave_the_run_are_reported(typed: str, code: str, location: str) -> None:
    [problem] = warnings_of(typed)
    assert has_problem([problem], code, location)
    assert problem.advice


def test_same_fault_is_reported_once() -> None:
    assert len(warnings_of("sh -c 'sbatch a.sh; sbatch b.sh'")) == 1


@pytest.mark.parametrize(
    "source", [TRAINER, "from trl import SFTTrainer\n", "import transformers\nt = transformers.Trainer(m)\n"]
)
def test_trainer_in_one_process_with_several_gpus_needs_torchrun(source: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source)
    [problem] = warnings_of("python -u train.py --lr 0.1", 2, tmp_path)
    assert has_problem([problem], "slow-setting", "train.py", "torchrun --nproc-per-node {gpus} train.py")


def test_trainer_that_uv_starts_needs_torchrun_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    assert has_problem(warnings_of("uv run train.py", 2, tmp_path), "slow-setting", "train.py")


def test_placeholders_of_gpus_on_cpu_are_reported() -> None:
    problems = warnings_of("torchrun --nproc-per-node {gpus} train.py", gpus=0)
    assert has_problem(problems, "no-gpu", "{gpus}", "so this is 0")
    assert warnings_of("echo {run} {folder} {}", gpus=0) == []


@pytest.mark.parametrize(
    ("typed", "gpus", "source"),
    [
        ("python train.py", 1, TRAINER),
        ("torchrun --nproc-per-node 2 train.py", 2, TRAINER),
        ("accelerate launch train.py", 2, TRAINER),
        ("python -m torch.distributed.run train.py", 2, TRAINER),
        ("python train.py", 2, TRAINER + "m = AutoModel.from_pretrained(n, device_map='auto')\n"),
        ("python train.py", 2, "# from transformers import Trainer\nfrom transformers import AutoModel\n"),
        ("python train.py", 2, "from lightning import Trainer\n"),
        ("python missing.py", 2, ""),
    ],
)
def test_trainer_with_launcher_one_gpu_or_model_parallelism_is_fine(
    typed: str, gpus: int, source: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(source)
    assert warnings_of(typed, gpus, tmp_path) == []


@pytest.mark.parametrize(
    ("typed", "name", "source"),
    [
        ("torchrun train.py", "train.py", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"),
        ("bash train.sh", "train.sh", "set -e\nexport CUDA_VISIBLE_DEVICES=0,1\npython train.py\n"),
    ],
)
def test_script_that_sets_visible_devices_is_reported_with_its_line(
    typed: str, name: str, source: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(source)
    assert has_problem(warnings_of(typed, 2, tmp_path), "gpu-override", f"{name}:2")


def test_script_that_reads_visible_devices_is_fine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("if os.environ['CUDA_VISIBLE_DEVICES'] == '0':\n    pass\n")
    assert warnings_of("python train.py", 2, tmp_path) == []


def test_script_that_is_long_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(TRAINER + "#" * MAX_SCRIPT_BYTES)
    os.mkfifo(tmp_path / "pipe.py")
    assert warnings_of("python long.py", 2, tmp_path) == []
    assert warnings_of("python pipe.py", 2, tmp_path) == []


def test_warning_escapes_arguments() -> None:
    [problem] = warnings_of("python train.py '--gpu_ids=0,\n1'")
    assert str(problem).isprintable()


def test_script_is_searched_in_linear_time(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from transformers import (\n" * (MAX_SCRIPT_BYTES // 32))
    assert warnings_of("python train.py", 2, tmp_path) == []


@pytest.mark.parametrize(("signal", "is_passed_on"), [("SIGINT", False), ("SIGTERM", False), ("SIGUSR2", True)])
def test_stop_signal_that_srun_does_not_pass_on_is_reported(signal: str, is_passed_on: bool) -> None:
    warnings = command_warnings(["srun", "-N2", "python", "train.py"], 0, Path("/"), signal)
    assert has_problem(warnings, "wrapper-breaks-run", "srun", "--stop-signal") is not is_passed_on
