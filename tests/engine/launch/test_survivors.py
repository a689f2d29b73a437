"""Processes of a command that outlive its supervisor and its keeper."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.command.membership import MARKER
from engine.launch.survivors import find_survivors, stop_survivors
from engine.runs.folder import RunFolder
from support.runs.event_factories import make_command_started
from support.runs.factories import make_run_folder


@pytest.fixture
def survivor() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The ID of a run and a process of it."""
    run_id = uuid.uuid4().hex
    with subprocess.Popen(["sleep", "61"], env={**os.environ, MARKER: run_id}) as process:
        yield run_id, process
        process.kill()


def make_crashed(root: Path, run_id: str) -> RunFolder:
    return make_run_folder(root, "a", make_command_started(1.0, run_id=run_id))


def test_process_with_the_id_of_the_run_is_found_and_ended(
    tmp_path: Path, survivor: tuple[str, subprocess.Popen[bytes]]
) -> None:
    run_id, process = survivor
    folder = make_crashed(tmp_path, run_id)
    assert [found.pid for found in find_survivors([folder])[folder]] == [process.pid]
    assert stop_survivors(folder) == (1, [])
    assert process.wait(5) < 0
    assert find_survivors([folder]) == {}


def test_run_that_others_can_change_names_no_process(
    tmp_path: Path, survivor: tuple[str, subprocess.Popen[bytes]]
) -> None:
    run_id, process = survivor
    folder = make_crashed(tmp_path, run_id)
    folder.path.chmod(0o777)
    assert find_survivors([folder]) == {}
    assert stop_survivors(folder) == (0, [])
    assert process.poll() is None
