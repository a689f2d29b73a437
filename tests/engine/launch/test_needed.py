"""`--needed`: which finished run has done what is requested."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.launch.needed import find_finished_run
from engine.launch.request import RunRequest
from engine.utils.errors import UsageError
from support.messages import has_problem
from support.repositories import git, make_repository, write_files
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


def test_command_with_variables_is_refused(runs: CommandRuns) -> None:
    with pytest.raises(UsageError) as error:
        finished(runs, "sh", "train.sh", expanded=("SEED",))
    assert has_problem(error.value.problems, "conflict", "--needed", "SEED")


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
