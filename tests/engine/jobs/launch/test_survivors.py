"""Processes of a command that outlive its supervisor and its keeper."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.jobs.command.membership import MARKER
from engine.jobs.launch.survivors import check_survivors, find_survivors, stop_survivors
from engine.runs.folder import RunFolder
from engine.runs.manage import rename_run
from support.runs.factories import make_command_run

Survivor = subprocess.Popen[bytes]


@pytest.fixture
def crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, str]:
    """A run without an owner, and its ID."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return make_command_run(tmp_path, "a")


@pytest.fixture
def folder(crashed: tuple[RunFolder, str]) -> RunFolder:
    return crashed[0]


@pytest.fixture
def survivor(crashed: tuple[RunFolder, str]) -> Iterator[Survivor]:
    """A process with the marker of the run."""
    with subprocess.Popen(["sleep", "61"], env={**os.environ, MARKER: crashed[1]}) as process:
        yield process
        process.kill()


def assert_names_nothing(folder: RunFolder) -> None:
    assert find_survivors([folder]) == {}
    check_survivors(folder)
    assert stop_survivors(folder) == (0, [])


def test_process_with_the_id_of_the_run_is_found_and_ended(folder: RunFolder, survivor: Survivor) -> None:
    assert [found.pid for found in find_survivors([folder])[folder]] == [survivor.pid]
    with pytest.raises(UsageError, match="go on"):
        check_survivors(folder)
    assert stop_survivors(folder) == (1, [])
    assert survivor.wait(5) == -signal.SIGTERM
    assert find_survivors([folder]) == {}


def test_run_that_others_can_change_names_no_process(folder: RunFolder, survivor: Survivor) -> None:
    folder.path.chmod(0o777)
    assert_names_nothing(folder)
    assert survivor.poll() is None


def test_copy_of_a_run_names_no_process(folder: RunFolder, survivor: Survivor, tmp_path: Path) -> None:
    assert_names_nothing(RunFolder(shutil.copytree(folder.path, tmp_path / "copy")))
    assert survivor.poll() is None


def test_run_that_was_renamed_names_its_processes(folder: RunFolder, survivor: Survivor) -> None:
    renamed = rename_run(folder, "b")
    assert [found.pid for found in find_survivors([renamed])[renamed]] == [survivor.pid]
    assert stop_survivors(renamed) == (1, [])
