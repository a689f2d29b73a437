"""Import rules: layers import only lower layers, and light modules import neither torch nor Textual."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from support.gputrain_command import GPUTRAIN, ROOT, Gputrain
from support.help_pages import HELP_PAGES

LIGHT = [
    "base.host",
    "config.loader",
    "config.optimizer_options",
    "config.schema",
    "config.user_code",
    "gpus.allocation",
    "gpus.monitor",
    "gpus.peak_flops",
    "gpus.recording",
    "gpus.sampler",
    "jobs.doctor.examine",
    "jobs.hosts.watch",
    "jobs.launch.launcher",
    "jobs.launch.program_run",
    "jobs.launch.rank_starter",
    "jobs.launch.supervise",
    "jobs.notify.run_messages",
    "jobs.sweeps.status",
    "report.page",
    "report.sync.mlflow_store",
    "report.sync.run_sync",
    "report.sync.wandb_service",
    "runs.bottleneck",
    "runs.checkpoint_files",
    "runs.control",
    "runs.events",
    "runs.folder",
    "runs.history",
    "runs.inspection",
    "runs.labels",
    "runs.manage",
    "runs.ownership",
    "runs.profile_file",
    "runs.query",
    "runs.run_list",
    "runs.run_row",
    "train.bench.report",
    "train.bench.runner",
    "train.data.pack",
    "train.data.plan",
    "train.data.sources.open",
    "train.data.sources.webdataset",
    "train.distributed.rank_env",
    "train.inference.preview",
    "train.models.catalog",
    "train.optim.lr_schedule",
    "train.optim.timm_optimizers",
    "watch.folders",
    "watch.parameters",
]


# Each takes 5 to 100 ms to import, and the first frame of the screen needs none of them.
LATE_MODULES = {"torch", "engine.config.schema", "engine.runs.events", "numpy", "psutil", "pydantic", "typer", "yaml"}


def modules_after(statement: str) -> set[str]:
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout))


def names_in(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]


def test_light_modules_import_neither_torch_nor_textual() -> None:
    # In one process, which stops at the first module that imports one of them.
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"engine.{name}")
    if heavy := sorted({"torch", "textual", "tui"} & set(sys.modules)):
        sys.exit(f"engine.{name} imports {', '.join(heavy)}")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *LIGHT], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_tui_never_imports_torch() -> None:
    loaded = modules_after("; ".join(f"import {name}" for name in names_in("tui")))
    assert "textual" in loaded
    assert "torch" not in loaded


def test_tui_imports_only_what_first_frame_needs() -> None:
    # The threads of the pollers import others when they first read.
    program = """
import asyncio, importlib.abc, json, sys, threading
from pathlib import Path
class Recorder(importlib.abc.MetaPathFinder):
    found = set()
    def find_spec(self, name, path, target=None):
        if threading.current_thread() is threading.main_thread():
            self.found.add(name)
sys.meta_path.insert(0, Recorder())
import tui.cli.open_tui
from tui.screens.app import GputrainApp
async def main():
    async with GputrainApp(Path("nowhere")).run_test():
        print(json.dumps(sorted(Recorder.found)))
asyncio.run(main())"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    found = set(json.loads(done.stdout))
    assert "textual.app" in found
    assert not LATE_MODULES & found


def test_training_without_compile_never_imports_dynamo(tmp_path: Path) -> None:
    run = "from pathlib import Path; from support.runs.in_process import train_in_process"
    loaded = modules_after(
        f"import sys; sys.path.insert(0, 'tests'); {run}; train_in_process(Path({str(tmp_path)!r}), 'run.epochs=1')"
    )
    assert "torch.optim" in loaded
    assert not {"torch._dynamo", "torch._inductor", "sympy", "torchvision"} & loaded


def test_help_imports_no_large_library(gputrain: Gputrain) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", GPUTRAIN, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=gputrain.environment,
    )
    assert "train image classifiers" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in loaded
    assert not {"torch", "textual", "pydantic", "msgspec"} & loaded


def test_run_flags_take_help_text_from_config() -> None:
    from engine.config.schema import summarize_key
    from tui.form.flags import FLAG_TO_KEY

    output = " ".join(HELP_PAGES.read_text().split())
    for flag, key in FLAG_TO_KEY.items():
        assert f"--{flag.replace('_', '-')} " in output
        # The queue's are only named.
        assert summarize_key(key) in output or key.startswith("queue.")


def test_class_name_stands_once() -> None:
    places: dict[str, list[str]] = {}
    for path in (path for room in ("engine", "tui") for path in (ROOT / room).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
