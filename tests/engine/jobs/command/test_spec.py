"""The command of a run on disk: private, complete, and trusted only if nobody else can have written it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.jobs.command.spec import (
    MAX_COMMAND_BYTES,
    Program,
    foreign_command_reason,
    forget_environment,
    has_command,
    read_command,
    write_command,
)
from engine.runs.folder import RunFolder

COMMAND = Program(
    argv=("python", "train.py", "\udcff{gpus}"),
    cwd="/work",
    cwd_inode=7,
    environment={"TOKEN": "secret", "ODD": "\udcfe"},
    stop_signal="SIGTERM",
    parse=("a=(?P<a>.)",),
    metrics=("logs",),
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_command_is_read_back_with_text_of_any_encoding(folder: RunFolder) -> None:
    write_command(folder, COMMAND)
    assert read_command(folder) == COMMAND


def test_only_the_user_can_read_it_whatever_the_umask(folder: RunFolder) -> None:
    umask = os.umask(0)
    try:
        write_command(folder, COMMAND)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(folder.command.stat().st_mode) == 0o600


def test_environment_can_be_forgotten(folder: RunFolder) -> None:
    write_command(folder, COMMAND)
    forget_environment(folder, COMMAND)
    assert read_command(folder).environment == {}
    assert read_command(folder).argv == COMMAND.argv


@pytest.mark.parametrize("content", ["", "{}", '{"format": 9}', '{"format": 1, "argv": "x"}', "[" * 100_000])
def test_damaged_file_is_refused(folder: RunFolder, content: str) -> None:
    folder.command.write_text(content)
    with pytest.raises(UsageError, match=r"command\.json"):
        read_command(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"argv": []},
        {"argv": ["a\0b"]},
        {"cwd": "work"},
        {"cwd_inode": -1},
        {"environment": {"A=B": "x"}},
        {"environment": {"A": "x\0"}},
        {"stop_signal": "SIGKILL"},
    ],
)
def test_command_that_cannot_be_started_is_refused(folder: RunFolder, values: dict[str, object]) -> None:
    folder.command.write_text(json.dumps({"format": 1, "argv": ["x"], "cwd": "/", "cwd_inode": 1} | values))
    with pytest.raises(UsageError, match=r"command\.json"):
        read_command(folder)


def test_huge_file_is_refused(folder: RunFolder) -> None:
    with folder.command.open("wb") as file:
        file.truncate(MAX_COMMAND_BYTES + 1)
    with pytest.raises(UsageError, match=r"command\.json"):
        read_command(folder)


def test_missing_file_is_refused(folder: RunFolder) -> None:
    assert not has_command(folder)
    with pytest.raises(UsageError, match="cannot be read"):
        read_command(folder)


def test_named_pipe_and_link_are_refused(folder: RunFolder) -> None:
    os.mkfifo(folder.command)
    with pytest.raises(UsageError):
        read_command(folder)
    assert foreign_command_reason(folder) == "is not a regular file"


def test_file_that_others_can_write_is_foreign(folder: RunFolder) -> None:
    write_command(folder, COMMAND)
    assert foreign_command_reason(folder) is None
    folder.command.chmod(0o666)
    assert foreign_command_reason(folder) == "is writable by all users"
