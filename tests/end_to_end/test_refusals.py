"""A config that cannot be trained is rejected by every front end with the same problem, and no files remain."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.base.errors import Problem
from engine.config.loader import resolve_config
from engine.gpus.monitor import first_snapshot, open_monitor
from engine.gpus.snapshot import SamplerOptions
from engine.jobs.launch.preflight import find_problems
from engine.runs.ownership import claim_run
from support.gputrain_command import GPUTRAIN, Gputrain, clean_environment
from support.messages import has_problem, says
from support.runs.trained_run import call
from tui.cli.train import StartOptions, build_request
from tui.form.checks import FormChecker
from tui.form.model import Form, validate_form

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

# Arguments, and the code, the location and a value of each expected problem.
Refusal = tuple[list[str], list[tuple[str, str, str]]]
REFUSED: dict[str, Refusal] = {
    "two problems": (
        ["model.weights=FOLDER/gone.pt", "data.batch_size=5000"],
        [("not-found", "model.weights", "FOLDER/gone.pt"), ("too-large", "data.batch_size", "10000")],
    ),
    "value and host": (
        ["optim.lr=-1", "data.num_classes=3"],
        [("out-of-range", "optim.lr", "-1"), ("conflict", "data.num_classes", "10")],
    ),
    "missing data path": (
        ["data.dataset=folder", "data.path=/nowhere"], [("not-found", "data.path", "/nowhere")]
    ),
    "folder without classes": (
        ["data.dataset=folder", "data.path=FOLDER/empty"], [("too-few-classes", "data.path", "FOLDER/empty")]
    ),
    "user code that does not import": (
        ["model.name=broken:build"], [("user-code-failed", "model.name", "broken:build")]
    ),
    "missing image set": (["data.dataset=cifar10", "data.path=FOLDER"], [("not-found", "data.path", "FOLDER")]),
    "missing GPU": (["device.gpus=7"], [("driver-unavailable", "device.gpus", "7")]),
    "too many ranks": (["device.ranks=4000"], [("too-many", "device.ranks", "4000")]),
    "existing name": (["run.name=there"], [("name-in-use", "run.name", "there")]),
    "live run": (["run.name=live", "run.resume=true"], [("already-running", "live", f"process {os.getpid()}")]),
    "changed immutable key": (
        ["run.name=there", "run.resume=true", "model.name=linear"],
        [("resume-differs", "model.name", "linear")],
    ),
}  # fmt: skip

# Refused for what is typed, before anything is looked at: the arguments, and the code, the location and a value.
TYPED = {
    "missing file": (["gone.yaml"], "not-found", "gone.yaml", "cifar10-fast, "),
    "second config": (["digits", "more"], "too-many", "more", "digits"),
    "key without equals sign": (["optim.lr", "0.1"], "missing-value", "optim.lr", "optim.lr=VALUE"),
    "two values": (["--lr", "0.1", "optim.lr=0.2"], "conflict", "optim.lr", "--lr 0.1 and optim.lr=0.2"),
    "name no folder can have": (["--name", "../a"], "invalid-name", "run.name", "'../a'"),
    "resume of no name": (["--resume"], "needs-key", "run.resume", "run.name (--name)"),
    "ngpu against gpus": (["--ngpu", "1", "--gpus", "cpu"], "conflict", "--ngpu", "--gpus free:1"),
    "env without torchrun": (["--launcher", "env"], "invalid-value", "--launcher env", "RANK"),
}  # fmt: skip

# One problem of each section.
ALL_SECTIONS = {
    "optim.lrr": "1", "run.epochs": "many", "schedule.name": "multistep", "augment.crop_scale": "[2, 1]",
    "optim.options": "{alpha: 1}", "model.weights": "nowhere.pt", "loss.name": "mine:x",
    "augment.transform": "nope:f", "data.dataset": "folder", "data.path": "/nowhere", "precision.amp": "fp8",
    "device.init_method": "tcp://host:1", "checkpoint.keep": "0", "device.gpus": "7",
}  # fmt: skip

# Detected only when the model is built.
REFUSED_MODELS: dict[str, Refusal] = {
    "weights of another model": (
        ["model.weights=FOLDER/other.pt"], [("conflict", "model.weights", "FOLDER/other.pt")]
    ),
    "frozen part that is not there": (
        ["model.freeze=[nothing]"], [("unknown-value", "model.freeze", "'nothing'")]
    ),
    "images too small": (["model.name=alexnet"], [("not-supported", "model.name", "1x8x8")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with user code, weights, and two runs, one of them live."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "empty").mkdir()
    (folder / "broken.py").write_text("import no_such_library\n")
    (folder / "mine.py").write_text("")
    torch.save({"nothing.weight": torch.zeros(7, 3)}, folder / "other.pt")
    earlier = claim_run(folder / "runs", "there", "x", resume=False)
    earlier.folder.config.write_text("model: {name: cnn}\n")
    earlier.ownership.release()
    live = claim_run(folder / "runs", "live", "x", resume=False)
    yield folder
    live.ownership.release()


@pytest.fixture
def workdir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `folder` the working folder, with an environment without GPUs."""
    monkeypatch.chdir(folder)
    for name, value in clean_environment(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def in_folder(refusal: Refusal, folder: Path) -> Refusal:
    arguments, expected = refusal
    return (
        [text.replace("FOLDER", str(folder)) for text in arguments],
        [(code, location, value.replace("FOLDER", str(folder))) for code, location, value in expected],
    )


def files(folder: Path) -> set[Path]:
    """All files of runs and temporary files; library caches are excluded."""
    return {*(folder / "runs").rglob("*"), *(folder / "tmp").glob("gputrain*")}


def assert_problems(problems: list[Problem], expected: list[tuple[str, str, str]]) -> None:
    assert len(problems) == len(expected), problems
    for problem, (code, location, value) in zip(problems, expected, strict=True):
        assert has_problem([problem], code, location, value), problem


def assert_messages(messages: list[str], expected: list[tuple[str, str, str]]) -> None:
    assert len(messages) == len(expected), messages
    for message, (code, location, value) in zip(messages, expected, strict=True):
        assert message.startswith(f"{location}: ") and says(message, code, value), message


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED.keys())
def test_preflight_returns_all_problems(refusal: Refusal, workdir: Path) -> None:
    arguments, expected = in_folder(refusal, workdir)
    before = files(workdir)
    assert_problems(preflight(workdir / "runs", arguments), expected)
    assert files(workdir) == before


def test_preflight_returns_problems_of_all_sections_and_an_unwritable_runs_folder(workdir: Path) -> None:
    problems = preflight(workdir / "mine.py" / "runs", [f"{key}={value}" for key, value in ALL_SECTIONS.items()])
    expected = {*ALL_SECTIONS, "schedule.milestones"} - {"schedule.name", "data.dataset"}
    assert expected < {problem.location for problem in problems}
    assert has_problem(problems, "not-writable", None, f"{workdir}/mine.py/runs", "--runs-dir")


def preflight(runs: Path, arguments: list[str]) -> list[Problem]:
    options = StartOptions(runs_dir=str(runs))
    return find_problems(build_request(lambda: resolve_config("digits", arguments), options, base="digits"))


@pytest.mark.parametrize(("arguments", "code", "location", "value"), TYPED.values(), ids=TYPED.keys())
def test_run_refuses_what_is_typed_in_one_line(
    workdir: Path, arguments: list[str], code: str, location: str, value: str
) -> None:
    done = call("run", "--headless", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says(done.stderr, code, f"error: {location}: ", value)
    assert not (workdir / "runs" / "digits-1").exists()


@pytest.mark.nightly
def test_form_shows_all_problems(workdir: Path) -> None:
    checker, monitor = FormChecker(workdir / "runs"), open_monitor(SamplerOptions(activity=False))
    snapshot = first_snapshot(monitor)
    monitor.close()
    before = files(workdir)
    try:
        for arguments, expected in (in_folder(refusal, workdir) for refusal in REFUSED.values()):
            form = Form("digits", dict(argument.split("=", 1) for argument in arguments))
            config, problems = validate_form(form)
            assert config is not None
            result = checker.check(checker.begin(config), config, snapshot, problems)
            assert result is not None
            assert_problems(result.problems, expected)
    finally:
        checker.cancel()
    assert files(workdir) == before


def headless(*arguments: str) -> list[str]:
    return [GPUTRAIN, "run", "--headless", "digits", *arguments]


def dry_run(*arguments: str) -> list[str]:
    return [GPUTRAIN, "run", "--dry-run", "digits", *arguments]


def under_torchrun(*arguments: str) -> list[str]:
    return [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python", *headless(*arguments)]


FRONT_ENDS: dict[str, tuple[Callable[..., list[str]], int]] = {
    "headless": (headless, 2),
    "dry run": (dry_run, 2),
    "torchrun": (under_torchrun, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "two problems",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("value and host", "weights of another model")),
    ],
)
@pytest.mark.parametrize(
    "front_end",
    [
        FRONT_ENDS["headless"],
        *(pytest.param(FRONT_ENDS[name], marks=pytest.mark.nightly) for name in ("dry run", "torchrun")),
    ],
    ids=FRONT_ENDS.keys(),
)
def test_run_prints_problems_once(
    front_end: tuple[Callable[..., list[str]], int], name: str, gputrain: Gputrain, folder: Path
) -> None:
    command, exit_code = front_end
    arguments, expected = in_folder((REFUSED | REFUSED_MODELS)[name], folder)
    before = files(folder)
    process = gputrain.start(*command(*arguments, "--runs-dir", str(folder / "runs")), stderr=subprocess.PIPE)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == exit_code
    errors = [line.removeprefix("error: ") for line in messages.splitlines() if line.startswith("error: ")]
    assert_messages(errors, expected)
    assert files(folder) == before
    assert not gputrain.processes()
