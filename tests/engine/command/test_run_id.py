"""The ID of a start, which is that of one folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from engine.command.run_id import last_run_id, make_run_id
from engine.runs.folder import RunFolder
from support.runs.event_factories import make_command_started
from support.runs.factories import make_command_run, make_run_folder


def test_run_id_is_unique_and_that_of_its_folder(tmp_path: Path) -> None:
    folder, run_id = make_command_run(tmp_path, "a")
    assert re.fullmatch(r"a-[0-9a-f]{32}", run_id)
    assert make_run_id(folder) != run_id == last_run_id(folder)


def test_renamed_run_has_its_run_id_and_a_copy_none(tmp_path: Path) -> None:
    folder, run_id = make_command_run(tmp_path, "a")
    shutil.copytree(folder.path, tmp_path / "copy")
    folder.path.rename(tmp_path / "b")
    assert last_run_id(RunFolder(tmp_path / "b")) == run_id
    assert last_run_id(RunFolder(tmp_path / "copy")) is None


@pytest.mark.parametrize("run_id", ["", "a", "0" * 32, f"a-{'0' * 32}", "a-\u00e9"])
def test_run_id_of_another_form_is_none(tmp_path: Path, run_id: str) -> None:
    assert last_run_id(make_run_folder(tmp_path, "a", make_command_started(run_id=run_id))) is None
