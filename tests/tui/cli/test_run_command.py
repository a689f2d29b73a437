"""`gputrain run … -- COMMAND`: what belongs to gputrain, what to the command, and what is refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.base.codec import replace
from engine.jobs.command.spec import Program, read_command, write_command
from engine.jobs.launch.request import RunRequest
from engine.runs.folder import RunFolder
from support.messages import has_problem, says
from support.runs.command_owner import stdin_with
from support.runs.factories import make_run_folder
from tui.cli.main import app
from tui.cli.run_command import command_stem


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
    words = ["--cwd", "sub", "--env", "LR=0.1", "--stop-signal", "term", "--tag", "x"]
    words += ["--metrics", "logs", "--parse", "a=(?P<a>.)", "--time-limit", "90", "notify.min_minutes=5"]
    assert invoke(*words, "--", "true").exit_code == 0
    [request] = requests
    command = request.command
    assert command is not None
    assert (command.cwd, command.environment["LR"], command.stop_signal) == (str(tmp_path / "sub"), "0.1", "SIGTERM")
    assert (command.metrics, command.parse) == (("logs",), ("a=(?P<a>.)",))
    assert (request.config.queue.time_limit, request.config.notify.min_minutes, request.tags) == (90, 5, ("x",))


@pytest.mark.parametrize(("option", "said"), [("--detach", True), ("--headless", False)])
def test_pipe_that_the_command_does_not_get_is_said(
    requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch, option: str, said: bool
) -> None:
    monkeypatch.setattr("tui.cli.train.start_in_background", lambda request, *_: requests.append(request))
    with stdin_with("hello\n"):
        assert invoke(option, "--", "cat").exit_code == 0
    assert has_problem(requests[0].warnings, "no-effect", "stdin", "/dev/null") is said


def test_arguments_of_a_resume_are_split_as_in_a_shell(requests: list[RunRequest]) -> None:
    assert invoke("--on-resume", "--ckpt_path '{folder}/my last.ckpt' -v", "--", "true").exit_code == 0
    assert invoke("--on-resume", "--resume", "--", "sh", "-c", 'train "$@"', "sh").exit_code == 0
    words = [request.command.on_resume for request in requests if request.command is not None]
    assert words == [("--ckpt_path", "{folder}/my last.ckpt", "-v"), ("--resume",)]


def test_command_needs_no_torch(requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.base.libraries.find_spec", lambda name: None)
    assert invoke("--", "true").exit_code == 0
    assert invoke("digits").exit_code == 2
    assert len(requests) == 1


def test_dry_run_of_a_command_prints_it_and_starts_nothing(requests: list[RunRequest]) -> None:
    result = invoke("--dry-run", "--", "true")
    assert (result.exit_code, requests) == (0, [])
    assert "true" in result.stdout
    refused = invoke("--dry-run", "--snapshot", "--", "true")
    assert says(refused.stderr, "no-repository", "run.snapshot")
    assert refused.exit_code != 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0.1", "--", "true"], "--lr 0.1: sets a training of gputrain, but"),
        (["model.name=mlp", "--", "true"], "model.name: sets a training of gputrain"),
        (["digits", "--", "true"], "digits: is a config beside the command"),
        (["--cwd", "missing", "--", "true"], "--cwd: "),
        (["--gpsu", "2", "--", "true"], "--gpsu: there is no such option"),
        (["--"], "--: no command follows"),
        (["--on-resume", "'a", "--", "true"], "--on-resume: cannot be split into arguments: no closing quotation"),
        (["--on-resume", "--resume", "--", "sh", "-c", "true"], "--on-resume: the line of a shell behind -c"),
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
        (
            ["--gpus", "cpu", "train.py", "--lr", "0.1"],
            "gputrain run --gpus cpu -- python train.py --lr 0.1",
        ),
        (["sh", "-c", "exit 1"], "gputrain run -- sh -c 'exit 1'"),
        (["./train.sh"], "gputrain run -- ./train.sh"),
    ],
)
def test_program_in_place_of_a_config_gets_the_line_to_type(
    requests: list[RunRequest], tmp_path: Path, words: list[str], line: str
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "train.sh").touch(0o755)
    result = invoke(*words)
    assert (result.exit_code, requests) == (2, [])
    assert says(result.stderr, "not-a-config", line)


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


@pytest.fixture
def open_run(requests: list[RunRequest], tmp_path: Path) -> RunFolder:
    """A run of a command whose folder everybody can change."""
    folder = make_run_folder(tmp_path / "runs", "a")
    folder.config.write_text("device: {gpus: cpu}\n")
    environment = {"LD_PRELOAD": "/evil.so", "TOKEN": "hunter2", "PATH": os.environ["PATH"]}
    argv = ("touch", "\x1b[2J", "x" * 10_000)
    command = Program(argv=argv, cwd=str(tmp_path), cwd_inode=1, environment=environment, on_resume=("--evil",))
    write_command(folder, command)
    folder.path.chmod(0o777)
    return folder


def resume(folder: RunFolder, *flags: str) -> Result:
    return CliRunner().invoke(app, ["resume", str(folder.path), "--headless", "--trust-owner", *flags])


def test_stored_command_that_others_can_change_is_shown_and_runs_only_with_trust(
    open_run: RunFolder, requests: list[RunRequest], tmp_path: Path
) -> None:
    result = resume(open_run)
    assert (result.exit_code, requests) == (125, [])
    command, folder, on_resume, stop_signal, *variables, error = result.stderr.splitlines()
    assert command.startswith("command: touch '\\x1b[2J' xxx") and command.endswith(" characters more")
    assert (folder, on_resume) == (f"folder: {tmp_path}", "arguments on resume: --evil")
    assert stop_signal == "stop signal: SIGINT"
    assert variables == ["variable: LD_PRELOAD=/evil.so", "variable: TOKEN=***"]
    assert says(error, "untrusted-code", "--trust-code")
    trusted = resume(open_run, "--trust-code")
    assert trusted.exit_code == 0 and "variable: LD_PRELOAD=/evil.so" in trusted.stderr, trusted.stderr
    [request] = requests
    assert request.command == read_command(open_run)


@pytest.mark.parametrize("words", [["--lr", "0.5"], ["epochs"]])
def test_resumed_command_takes_no_setting_of_a_training(
    open_run: RunFolder, requests: list[RunRequest], words: list[str]
) -> None:
    open_run.path.chmod(0o700)
    result = resume(open_run, *words)
    assert (result.exit_code, requests, len(result.stderr.splitlines())) == (125, [], 1)


def test_command_starts_again_with_its_environment_and_what_is_typed(
    open_run: RunFolder, requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run.path.chmod(0o700)
    stored = {"PATH": os.environ["PATH"], "A": "1", "B": "1", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}
    command = replace(read_command(open_run), environment=stored, expanded=("A", "B"), on_resume=("--old",))
    write_command(open_run, command)
    for name, value in {"A": "2", "B": "2", "C": "2", "SLURM_JOB_ID": "78"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert resume(open_run, "--env", "A", "--env", "D={run}").exit_code == 0
    assert resume(open_run, "--on-resume", "--new").exit_code == 0
    first, second = (request.command for request in requests)
    assert first is not None and second is not None
    environment = first.environment
    assert (environment["A"], environment["B"], environment["D"]) == ("2", "1", "{run}") and "C" not in environment
    # The variables of Slurm are those of the job in which it starts again.
    assert environment["SLURM_JOB_ID"] == "78" and "SLURM_NTASKS" not in environment
    assert (first.expanded, first.on_resume, second.on_resume) == (("B", "D"), ("--old",), ("--new",))
