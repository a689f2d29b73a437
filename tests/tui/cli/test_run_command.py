"""`gputrain run … -- COMMAND`: what belongs to gputrain, what to the command, and what is refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.command.spec import Command, read_command, write_command
from engine.launch.request import RunRequest
from engine.runs.folder import RunFolder
from support.messages import says
from support.runs.factories import make_run_folder
from tui.cli.main import app
from tui.cli.run_command import command_stem, split_command


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunRequest]:
    """The requests of commands that would start, which end with exit code 0."""
    found: list[RunRequest] = []

    def run(request: RunRequest, **_: object) -> None:
        found.append(request)

    monkeypatch.setattr("tui.cli.train.run_headless", run)
    monkeypatch.chdir(tmp_path)
    return found


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["run", *words], prog_name="gputrain")


def test_words_behind_the_separator_are_the_command(requests: list[RunRequest], tmp_path: Path) -> None:
    result = invoke("--gpus", "cpu", "--name", "a", "--", "python", "train.py", "--gpus", "2", "--", "rest")
    assert (result.exit_code, result.stderr) == (0, "")
    [request] = requests
    assert request.command is not None
    assert request.command.argv == ("python", "train.py", "--gpus", "2", "--", "rest")
    assert (request.command.cwd, request.config.device.gpus, request.config.run.name) == (str(tmp_path), "cpu", "a")


def test_options_of_commands_reach_the_request(requests: list[RunRequest], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    words = ["--cwd", "sub", "--env", "LR=0.1", "--stop-signal", "term", "--gpu-ids", "uuid", "--no-tty", "--tag", "x"]
    words += ["--metrics", "logs", "--parse", "a=(?P<a>.)", "--time-limit", "90", "notify.min_minutes=5"]
    assert invoke(*words, "--", "true").exit_code == 0
    [request] = requests
    command = request.command
    assert command is not None
    assert (command.cwd, command.environment["LR"], command.stop_signal) == (str(tmp_path / "sub"), "0.1", "SIGTERM")
    assert (command.gpu_ids, command.tty, command.metrics, command.parse) == ("uuid", False, ("logs",), ("a=(?P<a>.)",))
    assert (request.config.queue.time_limit, request.config.notify.min_minutes, request.tags) == (90, 5, ("x",))


def test_command_needs_no_torch(requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.utils.libraries.find_spec", lambda name: None)
    assert invoke("--", "true").exit_code == 0
    assert invoke("digits").exit_code == 2
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0.1", "--", "true"], "--lr 0.1: sets a training of gputrain"),
        (["model.name=mlp", "--", "true"], "model.name: sets a training of gputrain"),
        (["digits", "--", "true"], "digits: is a config beside the command"),
        (["--dry-run", "--", "true"], "--dry-run: is for trainings"),
        (["--stop-signal", "KILL", "--", "true"], "--stop-signal: KILL cannot ask to stop"),
        (["--cwd", "missing", "--", "true"], "--cwd: "),
        (["--gpsu", "2", "--", "true"], "--gpsu: there is no such option"),
        (["--"], "--: no command follows"),
    ],
)
def test_wrong_use_with_a_command_ends_with_125(requests: list[RunRequest], words: list[str], said: str) -> None:
    result = invoke(*words)
    assert (result.exit_code, result.stdout, requests) == (125, "", [])
    assert result.stderr.startswith(f"error: {said}") and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.py"], "gputrain run -- python train.py"),
        (["--gpus", "cpu", "train.py", "--lr", "0.1"], "gputrain run --gpus cpu -- python train.py --lr 0.1"),
        (["sh", "-c", "exit 1"], "gputrain run -- sh -c 'exit 1'"),
        (["./train.sh"], "gputrain run -- ./train.sh"),
    ],
)
def test_program_in_place_of_a_config_gets_the_line_to_type(
    requests: list[RunRequest], words: list[str], line: str
) -> None:
    result = invoke(*words)
    assert (result.exit_code, requests) == (2, [])
    assert says(result.stderr, "not-a-config", line)


def test_option_of_commands_without_a_command_is_refused(requests: list[RunRequest]) -> None:
    result = invoke("digits", "--no-tty")
    assert result.exit_code == 2
    assert says(result.stderr, "conflict", "--no-tty")


@pytest.mark.parametrize(
    ("line", "stem"),
    [
        ("python train.py --lr 0.1", "train"),
        ("torchrun --nproc-per-node 2 src/fit.py", "fit"),
        ("python -m pkg.main", "main"),
        ("yolo classify train", "yolo"),
        ("/usr/bin/python3 -c pass", "python3"),
        ("uv run train.py", "train"),
    ],
)
def test_run_is_named_for_its_script(line: str, stem: str) -> None:
    assert command_stem(line.split()) == stem


def test_only_the_first_separator_splits() -> None:
    assert split_command(["a", "--", "b", "--", "c"]) == (["a"], ["b", "--", "c"])
    assert split_command(["a"]) == (["a"], None)


@pytest.fixture
def open_run(requests: list[RunRequest], tmp_path: Path) -> RunFolder:
    """A run of a command whose folder everybody can change."""
    folder = make_run_folder(tmp_path / "runs", "a")
    folder.config.write_text("device: {gpus: cpu}\n")
    environment = {"LD_PRELOAD": "/evil.so", "TOKEN": "hunter2", "PATH": os.environ["PATH"]}
    argv = ("touch", "\x1b[2J", "x" * 10_000)
    write_command(folder, Command(argv=argv, cwd=str(tmp_path), cwd_inode=1, environment=environment))
    folder.path.chmod(0o777)
    return folder


def resume(folder: RunFolder, *flags: str) -> Result:
    return CliRunner().invoke(app, ["resume", str(folder.path), "--headless", "--trust-owner", *flags])


def test_stored_command_that_others_can_change_is_shown_and_refused(
    open_run: RunFolder, requests: list[RunRequest], tmp_path: Path
) -> None:
    result = resume(open_run)
    assert (result.exit_code, requests) == (2, [])
    command, folder, stop_signal, *variables, error = result.stderr.splitlines()
    assert command.startswith("command: touch '\\x1b[2J' xxx") and command.endswith(" characters more")
    assert (folder, stop_signal) == (f"folder: {tmp_path}", "stop signal: SIGINT")
    assert variables == ["variable: LD_PRELOAD=/evil.so", "variable: TOKEN=***"]
    assert says(error, "untrusted-code", "--trust-code")


def test_trusted_command_of_others_is_shown_and_runs(open_run: RunFolder, requests: list[RunRequest]) -> None:
    result = resume(open_run, "--trust-code")
    assert result.exit_code == 0, result.stderr
    assert "variable: LD_PRELOAD=/evil.so" in result.stderr
    [request] = requests
    assert request.command == read_command(open_run)


def test_own_stored_command_runs_without_a_word(open_run: RunFolder, requests: list[RunRequest]) -> None:
    open_run.path.chmod(0o700)
    result = resume(open_run)
    assert (result.exit_code, result.stderr, len(requests)) == (0, "", 1)
