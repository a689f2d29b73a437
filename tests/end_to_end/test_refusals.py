"""A config that cannot be trained is rejected by every front end with the same sentence, and no files remain."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.config.loader import resolve_config
from engine.gpus.allocation import first_snapshot
from engine.gpus.monitor import open_monitor
from engine.gpus.snapshot import SamplerOptions
from engine.launch.preflight import find_problems
from engine.runs.claimed_run import claim_run
from support.gputrain_command import GPUTRAIN, Gputrain, clean_environment
from support.runs.factories import find_free_port
from tui.cli.train import build_request
from tui.form.checks import FormChecker
from tui.form.model import Form, validate_form

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

# Arguments, and the beginning of each expected error.
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["optim.lrr=1"], ["optim.lrr: unknown key"]),
    "bad value": (["run.epochs=many"], ["run.epochs: 'many' is not allowed"]),
    "impossible pair": (["schedule.name=plateau", "schedule.by=step"], ["schedule.by: schedule plateau"]),
    "two problems": (
        ["model.name=cnnn", "data.batch_size=5000"],
        ["model.name: no model is named 'cnnn'", "data.batch_size: the global batch size is 10000"],
    ),
    "value and host": (["optim.lr=-1", "model.name=cnnn"], ["optim.lr: -1 is not", "model.name: no model is named"]),
    "unknown dataset": (["data.dataset=digitz"], ["data.dataset: 'digitz' is not allowed"]),
    "missing data path": (["data.dataset=folder", "data.path=/nowhere"], ["data.path: /nowhere does not exist"]),
    "folder without classes": (["data.dataset=folder", "data.path=FOLDER/empty"], ["data.path: FOLDER/empty contains"]),
    "user code that does not import": (["model.name=broken:build"], ["model.name: broken:build: broken cannot be"]),
    "user code without attribute": (["model.name=mine:nothing"], ["model.name: mine:nothing: mine has no nothing"]),
    "missing weights": (["model.weights=FOLDER/gone.pt"], ["model.weights: FOLDER/gone.pt does not exist"]),
    "batch larger than data": (["data.batch_size=5000"], ["data.batch_size: the global batch size is 10000"]),
    "warmup longer than run": (
        ["schedule.warmup_epochs=0", "schedule.warmup_steps=100000"],
        ["schedule.warmup_steps: must be at most the 330 steps"],
    ),
    "unknown timm optimizer": (["optim.name=timm:sgdd"], ["optim.name: timm"]),
    "missing image set": (["data.dataset=cifar10", "data.path=FOLDER"], ["data.path: cifar10 is not in FOLDER"]),
    "other number of classes": (["data.num_classes=3"], ["data.num_classes: is 3, but digits has 10 classes"]),
    "missing GPU": (["device.gpus=7"], ["device.gpus: 7 cannot be used"]),
    "no GPU at all": (["device.gpus=all"], ["device.gpus: all"]),
    "too many ranks": (["device.ranks=4000"], ["device.ranks: 4000 ranks are too many"]),
    "pipeline without memory": (
        ["data.dataset=fake", "data.fake_train=100000000", "data.pipeline=memory"],
        ["data.pipeline: memory is impossible"],
    ),
    "invalid name": (["run.name=../a"], ["run.name: '../a' is not allowed"]),
    "existing name": (["run.name=there"], ["run.name: the run there already exists"]),
    "reserved name": (["run.name=last"], ["run.name: last is reserved"]),
    "live run": (["run.name=live", "run.resume=true"], ["live: is already running as process"]),
    "changed immutable key": (
        ["run.name=there", "run.resume=true", "model.name=linear"],
        ["model.name: cannot change when a run is resumed: it began with cnn, not linear"],
    ),
    "unwritable init_method": (["device.init_method=file:///nowhere/meet"], ["device.init_method: /nowhere is no"]),
}  # fmt: skip

# Detected only when the model is built.
REFUSED_MODELS: dict[str, tuple[list[str], list[str]]] = {
    "weights of another model": (["model.weights=FOLDER/other.pt"], ["model.weights: weights of FOLDER/other.pt"]),
    "frozen part that is not there": (["model.freeze=[nothing]"], ["model.freeze: the model has no weights named"]),
    "images too small": (["model.name=alexnet"], ["model.name: alexnet does not accept 1x8x8 images"]),
}

Refusal = tuple[list[str], list[str]]


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
    arguments, sentences = ([text.replace("FOLDER", str(folder)) for text in texts] for texts in refusal)
    return arguments, sentences


def files(folder: Path) -> set[Path]:
    """All files of runs and temporary files; library caches are excluded."""
    return {*(folder / "runs").rglob("*"), *(folder / "tmp").glob("gputrain*")}


def assert_sentences(messages: list[str], expected: list[str]) -> None:
    assert len(messages) == len(expected), messages
    for message, beginning in zip(messages, expected, strict=True):
        assert message.startswith(beginning)


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED.keys())
def test_preflight_returns_all_problems(refusal: Refusal, workdir: Path) -> None:
    arguments, expected = in_folder(refusal, workdir)
    before = files(workdir)
    request = build_request(lambda: resolve_config("digits", arguments), "digits", str(workdir / "runs"))
    assert_sentences([str(problem) for problem in find_problems(request)], expected)
    assert files(workdir) == before


def test_preflight_refuses_unwritable_runs_folder(workdir: Path) -> None:
    request = build_request(lambda: resolve_config("digits"), "digits", str(workdir / "mine.py" / "runs"))
    [problem] = find_problems(request)
    assert str(problem).startswith(f"runs folder: {workdir}/mine.py/runs cannot be written to: Not a directory")


@pytest.mark.expensive("one of the form's helper processes builds three models, the other checks 26 configs")
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
            assert_sentences([str(problem) for problem in result.problems], expected)
        for arguments, expected in (in_folder(refusal, workdir) for refusal in REFUSED_MODELS.values()):
            config = Form("digits", dict(argument.split("=", 1) for argument in arguments)).config()
            problems = checker.check_model(checker.begin(config), config, on_gpu=False).problems
            assert_sentences([str(problem) for problem in problems], expected)
    finally:
        checker.cancel()
    assert files(workdir) == before


def headless(*arguments: str) -> list[str]:
    return [GPUTRAIN, "run", "--headless", "digits", *arguments]


def dry_run(*arguments: str) -> list[str]:
    return [GPUTRAIN, "run", "--dry-run", "digits", *arguments]


def under_torchrun(*arguments: str) -> list[str]:
    options = ["--nproc-per-node", "2", "--master-port", str(find_free_port()), "--no-python"]
    return [TORCHRUN, *options, *headless(*arguments)]


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
    assert_sentences(errors, expected)
    assert files(folder) == before
    assert not gputrain.processes()


@pytest.mark.expensive("doctor imports torch, torchvision and timm, and tries the devices")
@pytest.mark.parametrize(
    "name",
    [
        "two problems",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("weights of another model", "existing name")),
    ],
)
def test_doctor_reports_problems_of_run(name: str, gputrain: Gputrain, folder: Path) -> None:
    arguments, expected = in_folder((REFUSED | REFUSED_MODELS)[name], folder)
    before = files(folder)
    done = gputrain("doctor", "digits", *arguments, "--runs-dir", str(folder / "runs"), "--json")
    assert done.returncode == 2, done.stderr
    problems = [check["found"] for check in json.loads(done.stdout)["checks"] if check["state"] == "problem"]
    assert_sentences(problems, expected)
    assert files(folder) == before


@pytest.mark.nightly
def test_torchrun_leaves_no_file_of_rendezvous(gputrain: Gputrain, folder: Path) -> None:
    rendezvous_file = gputrain.folder / "meet"
    arguments = [f"device.init_method=file://{rendezvous_file}", "model.name=cnnn"]
    process = gputrain.start(*under_torchrun(*arguments), stderr=subprocess.PIPE)
    _, messages = process.communicate(timeout=60)
    assert messages.count("error: model.name: no model is named 'cnnn'") == 1
    assert not rendezvous_file.exists()
    assert not gputrain.runs.exists()
