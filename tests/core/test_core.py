"""An installation without the extra `train`: what it brings, and what each command does there.

`.ci/run` makes one, and runs these tests in it with pytest alone. Elsewhere they are skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.screen.pseudo_terminal import PseudoTerminal
from tui.cli.tree import COMMANDS

if find_spec("torch") is not None:
    pytest.skip("needs an environment without torch, which .ci/run makes", allow_module_level=True)

RECORDINGS = Path(__file__).parent.parent / "recordings"
PROGRAMS = Path(sys.executable).parent
MAX_MEGABYTES = 160
# What the environment brings, or these tests need.
NOT_OURS = ("pip", "setuptools", "pkg_resources", "pytest", "_pytest", "pluggy", "iniconfig")
TRAINING_LINE = "torch is not installed; in a clone of gputrain: pip install '.[train]'"
# Lines that work, in this order; `kept` is a stored run.
ANSWERED = [
    "runs --json", "runs show kept", "runs tag kept +small", "runs note kept text", "runs archive kept",
    "runs unarchive kept", "runs better speed high", "runs rename kept other", "runs delete other --yes", "runs trash",
    "runs restore other kept", "logs kept", "wait kept --until stopped", "compare kept kept-2", "stop kept",
    "watch lightning --json",
    "queue --json", "gpus --json", "doctor", "config digits", "config describe optim.lr", "models",
    "clean --json", "data pack photos -o shards", "sweep stop kept-sweep", "queue resume",
]  # fmt: skip
# Lines that do nothing here for another reason than torch: a library, a run that has ended, a terminal that is none.
OTHERWISE_REFUSED = [
    "attach kept", "evaluate kept", "report kept", "runs sync kept --service mlflow", "sweep show kept-sweep",
    "sweep list", "runs pause kept", "runs continue kept", "runs checkpoint kept", "runs profile kept",
    "queue hold kept", "queue release kept", "queue move kept --first", "queue priority kept 1", "queue begin kept now",
    "sweep --maximize acc lr=1,2 -- echo {lr}",
]  # fmt: skip
REFUSED = {
    "bench": "digits", "data show": "digits", "export": "kept", "lr-find": "digits", "models show": "digits",
    "predict": "kept photo.png", "resume": "kept", "run": "digits", "sweep resume": "kept-sweep",
    "sweep run": "digits optim.lr=log:1e-3..0.3",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with two runs, a sweep, images and the metrics of another trainer."""
    folder = tmp_path_factory.mktemp("core")
    for name, source in {"kept": "kept", "kept-2": "kept", "kept-sweep": "kept-sweep"}.items():
        shutil.copytree(RECORDINGS / "format-1" / source, folder / "runs" / name)
        if source == "kept":
            (folder / "runs" / name / "lock").touch()
    shutil.copytree(RECORDINGS / "foreign" / "lightning", folder / "lightning")
    save_images(folder / "photos")
    return folder


def save_images(folder: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / name / f"{number}.png")


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUTRAIN_", "PYTHON"))}
    own = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
    return kept | own | {"COLUMNS": "200", "GPUTRAIN_RUNS": str(folder / "runs")}


def call(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAMS / "gputrain"), *words]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=60
    )


def test_core_brings_no_library_that_only_training_needs() -> None:
    heavy = ("torch", "torchvision", "timm", "safetensors", "simplejpeg", "tensorboard", "grpc", "google.protobuf")
    assert [name for name in heavy if find_spec(name.partition(".")[0]) is not None] == []


def test_core_stays_small() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    sizes = {
        entry.name: sum(file.lstat().st_blocks * 512 for file in (entry, *entry.rglob("*")))
        for entry in packages.iterdir()
        if not entry.name.startswith(NOT_OURS)
    }
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert sum(sizes.values()) < MAX_MEGABYTES << 20, largest


@pytest.mark.parametrize("line", ANSWERED)
def test_command_that_reads_works(folder: Path, line: str) -> None:
    done = call(folder, shlex.split(line))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    if line.endswith("--json"):
        json.loads(done.stdout)


@pytest.mark.parametrize("line", OTHERWISE_REFUSED)
def test_command_for_another_state_is_refused_in_a_sentence(folder: Path, line: str) -> None:
    done = call(folder, shlex.split(line))
    assert done.returncode != 0
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_command_that_trains_names_the_extra(folder: Path, name: str) -> None:
    done = call(folder, shlex.split(f"{name} {REFUSED[name]}"))
    assert (done.returncode, done.stdout) == (2, "")
    # `run` also names the line for other programs.
    assert done.stderr.startswith(f"error: gputrain {name}: {TRAINING_LINE}") and done.stderr.count("\n") == 1
    assert sorted(file.name for file in (folder / "runs").iterdir() if not file.name.startswith(".")) == [
        "kept", "kept-2", "kept-sweep",
    ]  # fmt: skip


def test_page_for_agents_is_part_of_the_installation(folder: Path) -> None:
    assert call(folder, ["--skill"]).stdout.startswith("---\nname: gputrain\n")


def test_command_of_another_program_runs(folder: Path, tmp_path: Path) -> None:
    line = "run --headless --gpus cpu --name other -- sh -c"
    done = call(folder, [*line.split(), "echo step 1 loss=0.5; exit 3", "--runs-dir", "is not ours"])
    assert (done.returncode, done.stdout) == (3, "step 1 loss=0.5\n"), done.stderr
    listed = json.loads(call(folder, ["runs", "other", "--json"]).stdout)["runs"]
    assert [(run["state"], run["metrics"], run["exit_code"]) for run in listed] == [("failed", {"loss": 0.5}, 3)]
    assert call(folder, ["resume", "other", "--headless"]).returncode == 3
    assert call(folder, ["runs", "delete", "other", "--yes"]).returncode == 0


def test_each_command_is_tried() -> None:
    tried = {name for name in COMMANDS for line in (*ANSWERED, *OTHERWISE_REFUSED) if f"{line} ".startswith(f"{name} ")}
    defaults = {"config show", "queue list", "runs list"}
    assert {*COMMANDS} == tried | {*REFUSED} | defaults | {"models list"}
    # They start the command of a run again, and those of a sweep's trials, without torch.
    assert {*REFUSED} - {"resume", "sweep resume"} == {name for name, entry in COMMANDS.items() if entry.needs_torch}


def test_doctor_reports_missing_extra_as_a_warning(folder: Path) -> None:
    done = call(folder, ["doctor", "--json"])
    [check] = [check for check in json.loads(done.stdout)["checks"] if check["code"] == "not-installed"]
    assert (check["state"], check["advice"]) == ("warning", TRAINING_LINE)


def test_screen_opens_and_its_form_names_the_extra(folder: Path) -> None:
    with PseudoTerminal([str(PROGRAMS / "gputrain-tui")], 100, 30, environment(folder)) as terminal:
        terminal.seconds_until("kept-2")
        terminal.press("n")
        terminal.seconds_until("torch is not installed")
