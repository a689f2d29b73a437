"""`--needed`: which finished run has done what is requested."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.code import state
from engine.code.state import MAX_FILE_BYTES
from engine.command.user_key import KEY_FILE
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.launch.needed import find_finished_run
from engine.launch.request import RunRequest
from engine.utils.errors import UsageError
from engine.utils.files import state_folder
from support.messages import has_problem
from support.repositories import add_submodule, git, make_repository, write_files
from support.runs.command_owner import CommandRuns, make_command


@pytest.fixture
def runs(tmp_path: Path) -> CommandRuns:
    runs = CommandRuns(tmp_path)
    make_repository(runs.cwd, train__sh="true\n")
    (tmp_path / "data").mkdir()
    write_files(tmp_path / "data", x__txt="a")
    return runs


def finished(runs: CommandRuns, *argv: str, **values: Any) -> str | None:
    command = make_command(runs.cwd, *argv, **values)
    folder = find_finished_run(RunRequest(Config(), runs.folder, "a", command=command))
    return None if folder is None else folder.name


def test_finished_run_of_the_same_command_and_code_is_found(runs: CommandRuns) -> None:
    assert finished(runs, "sh", "train.sh") is None
    runs.run("sh", "train.sh")
    assert finished(runs, "sh", "train.sh") == "a"
    assert finished(runs, "sh", "train.sh", "--lr", "1") is None


def test_variables_of_a_command_count_but_their_values_are_not_kept(runs: CommandRuns) -> None:
    def typed(lr: str, value: str = "hunter2") -> dict[str, Any]:
        environment = {"PATH": os.environ["PATH"], "LR": lr, "TOKEN": value}
        return {"environment": environment, "given": ("LR", "TOKEN"), "expanded": ("LR",)}

    runs.run("sh", "train.sh", **typed("0.1"))
    assert finished(runs, "sh", "train.sh", **typed("0.1")) == "a"
    assert finished(runs, "sh", "train.sh", **typed("0.2")) is None
    assert finished(runs, "sh", "train.sh", **typed("0.1", "other")) is None
    assert finished(runs, "sh", "train.sh") is None
    assert finished(runs, "sh", "train.sh", **typed("0.1") | {"expanded": ()}) is None
    stored = runs.run_folder.command.read_text()
    assert "hunter2" not in stored and "0.1" not in stored


def test_digest_of_variables_needs_a_key_that_only_its_user_can_read(runs: CommandRuns) -> None:
    values = {"environment": {"PATH": os.environ["PATH"], "LR": "1"}, "given": ("LR",)}
    runs.run("sh", "train.sh", **values)
    key = state_folder() / KEY_FILE
    assert key.stat().st_mode & 0o077 == 0
    # Whoever copies the run has no key, and nor has this user without it.
    key.unlink()
    assert finished(runs, "sh", "train.sh", **values) is None


def test_variables_are_refused_where_no_key_can_be_kept(runs: CommandRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    values = {"environment": {"PATH": os.environ["PATH"], "TOKEN": "hunter2"}, "given": ("TOKEN",)}
    runs.run("sh", "train.sh", **values)
    assert "hunter2" not in runs.run_folder.command.read_text()
    with pytest.raises(UsageError) as refused:
        finished(runs, "sh", "train.sh", **values)
    assert has_problem(refused.value.problems, "not-writable", "--needed", "--env")


def test_failed_run_does_not_count(runs: CommandRuns) -> None:
    runs.run("sh", "-c", "exit 1")
    assert finished(runs, "sh", "-c", "exit 1") is None


def test_changed_code_and_another_commit_are_other_code(runs: CommandRuns) -> None:
    runs.run("sh", "train.sh")
    write_files(runs.cwd, train__sh="true # changed\n")
    assert finished(runs, "sh", "train.sh") is None
    git(runs.cwd, "commit", "--quiet", "--all", "--message", "second")
    assert finished(runs, "sh", "train.sh") is None


def test_untracked_output_of_the_run_is_not_other_code(runs: CommandRuns) -> None:
    line = ("sh", "-c", "echo done > result.txt")
    runs.run(*line)
    assert (runs.cwd / "result.txt").exists() and finished(runs, *line) == "a"


def test_output_of_earlier_runs_that_the_run_replaced_is_not_other_code(runs: CommandRuns) -> None:
    line = ("sh", "-c", "date +%N | tee out.txt results.csv results.json train.log")
    write_files(runs.cwd, out__txt="old\n", results__csv="old\n", results__json="old\n", train__log="old\n")
    runs.run(*line)
    assert finished(runs, *line) == "a"


def test_edit_in_a_submodule_and_of_a_large_untracked_file_is_other_code(runs: CommandRuns, tmp_path: Path) -> None:
    add_submodule(runs.cwd, tmp_path / "inner")
    write_files(runs.cwd, large__py="#" * (MAX_FILE_BYTES + 1))
    runs.run("sh", "train.sh")
    assert finished(runs, "sh", "train.sh") == "a"
    write_files(runs.cwd / "inner", lib__py="y\n")
    assert finished(runs, "sh", "train.sh") is None
    write_files(runs.cwd / "inner", lib__py="x\n")
    assert finished(runs, "sh", "train.sh") == "a"
    write_files(runs.cwd, large__py="#" * (MAX_FILE_BYTES + 2))
    assert finished(runs, "sh", "train.sh") is None


def test_run_with_a_missing_submodule_is_found_while_it_is_missing(runs: CommandRuns, tmp_path: Path) -> None:
    add_submodule(runs.cwd, tmp_path / "inner")
    shutil.rmtree(runs.cwd / "inner")
    runs.run("sh", "train.sh")
    assert finished(runs, "sh", "train.sh") == "a"
    git(runs.cwd, "-c", "protocol.file.allow=always", "submodule", "--quiet", "update", "--init")
    assert finished(runs, "sh", "train.sh") is None


def test_run_whose_code_was_not_read_whole_is_not_found(runs: CommandRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(runs.cwd, first__txt="", second__txt="")
    with monkeypatch.context() as patched:
        patched.setattr(state, "MAX_NAMES_BYTES", 10)
        runs.run("sh", "train.sh")
    assert finished(runs, "sh", "train.sh") is None


def test_code_that_cannot_be_compared_is_refused(runs: CommandRuns, tmp_path: Path) -> None:
    add_submodule(runs.cwd, tmp_path / "inner")
    (runs.cwd / "inner" / ".git").unlink()
    with pytest.raises(UsageError) as refused:
        finished(runs, "sh", "train.sh")
    assert has_problem(refused.value.problems, "not-supported", "--needed", "inner")


def test_data_of_a_command_counts(runs: CommandRuns) -> None:
    runs.run("sh", "train.sh", data=("../data",))
    assert finished(runs, "sh", "train.sh", data=("../data",)) == "a"
    assert finished(runs, "sh", "train.sh") is None
    write_files(runs.cwd.parent / "data", x__txt="ab")
    assert finished(runs, "sh", "train.sh", data=("../data",)) is None


def test_command_outside_of_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        finished(CommandRuns(tmp_path), "true")
    assert has_problem(refused.value.problems, "no-repository", "--needed")


def test_training_of_user_code_outside_of_git_and_of_user_data_is_refused(tmp_path: Path) -> None:
    base = RunRequest(resolve_config("digits", []).config, tmp_path / "runs", "digits")
    for values, code in (
        ({"loss": {"name": "mine:loss"}}, "no-repository"),
        ({"data": {"dataset": "mine:data"}}, "not-supported"),
    ):
        config = base.config.with_values(run={"code": str(tmp_path)}, **values)
        with pytest.raises(UsageError) as refused:
            find_finished_run(replace(base, config=config))
        assert has_problem(refused.value.problems, code, "--needed")
