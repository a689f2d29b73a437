"""Arrows run one way: the screen knows the engine, the engine knows no screen, and what is light stays light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gputrain_command import GPUTRAIN, ROOT, Gputrain

LIGHT = [
    "config.schema",
    "config.loader",
    "config.optimizer_options",
    "config.user_code",
    "runs.events",
    "runs.history",
]
LIGHT += ["runs.folder", "runs.ownership", "runs.control", "runs.bottleneck", "runs.checkpoint_files"]
LIGHT += [
    "optim.lr_schedule",
    "optim.timm_optimizers",
    "data.sources.open",
    "data.limits",
    "distributed.rank_env",
    "utils.host",
]
LIGHT += ["gpus.monitor", "gpus.sampler", "gpus.allocation", "gpus.recording", "gpus.peak_flops", "doctor.examine"]
LIGHT += ["launch.launcher", "launch.supervisor", "launch.forkserver", "bench.report"]


def modules_after(statement: str) -> set[str]:
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout))


def names_in(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]


@pytest.mark.parametrize("name", LIGHT)
def test_light_module_imports_neither_torch_nor_textual(name: str) -> None:
    assert not {"torch", "textual", "tui"} & modules_after(f"import engine.{name}")


def test_engine_never_imports_tui() -> None:
    loaded = modules_after("; ".join(f"import {name}" for name in names_in("engine")))
    assert "torch" in loaded
    assert not {"tui", "textual", "typer", "rich"} & loaded


def test_tui_never_imports_torch() -> None:
    loaded = modules_after("; ".join(f"import {name}" for name in names_in("tui")))
    assert "textual" in loaded
    assert "torch" not in loaded


def test_training_without_compile_never_imports_dynamo() -> None:
    run = "from tempfile import mkdtemp; from pathlib import Path; from in_process import train_in_process"
    loaded = modules_after(
        f"import sys; sys.path.insert(0, 'tests'); {run}; train_in_process(Path(mkdtemp()), 'run.epochs=1')"
    )
    assert "torch.optim" in loaded
    assert not {"torch._dynamo", "torch._inductor", "sympy", "torchvision"} & loaded


def test_help_imports_neither_torch_nor_textual_nor_pydantic(gputrain: Gputrain) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", GPUTRAIN, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=gputrain.environment,
    )
    assert "Train on several GPUs from a terminal" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in loaded
    assert not {"torch", "textual", "pydantic"} & loaded


def test_run_flags_take_help_text_from_config(gputrain: Gputrain) -> None:
    from engine.config.schema import describe_key
    from tui.flags import FLAG_TO_KEY

    shown = " ".join(gputrain("run", "--help").stdout.split())
    for flag, key in FLAG_TO_KEY.items():
        assert f"--{flag.replace('_', '-')} " in shown
        assert f"{describe_key(key)} ({key})" in shown
