"""The ID of a start, which only this user can make, and only for one folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.command.run_id import last_run_id, make_run_id
from engine.command.user_key import KEY_FILE
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from support.runs.event_factories import make_command_started
from support.runs.factories import make_command_run, make_run_folder


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_run_id_is_unique_and_that_of_its_folder(tmp_path: Path) -> None:
    folder, run_id = make_command_run(tmp_path, "a")
    assert re.fullmatch(r"a-[0-9a-f]{32}", run_id)
    assert make_run_id(folder) != run_id == last_run_id(folder)


def test_owner_makes_the_run_id_in_its_held_folder(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a")
    with folder.held() as held:
        run_id = make_run_id(held)
    assert run_id.startswith("a-")
    folder.journal.write_text(to_line(make_command_started(run_id=run_id)) + "\n")
    assert last_run_id(folder) == run_id


@pytest.mark.parametrize("run_id", ["", "a", "0" * 32, f"a-{'0' * 32}", "a-\u00e9"])
def test_run_id_of_another_form_is_none(tmp_path: Path, run_id: str) -> None:
    make_run_id(RunFolder(tmp_path))
    assert last_run_id(make_run_folder(tmp_path, "a", make_command_started(run_id=run_id))) is None


def test_run_id_with_another_key_is_none(tmp_path: Path, state: Path) -> None:
    folder, _ = make_command_run(tmp_path, "a")
    (state / "gputrain" / KEY_FILE).unlink()
    assert last_run_id(folder) is None
    make_run_id(folder)
    assert last_run_id(folder) is None


def test_run_id_is_random_if_the_key_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    folder, run_id = make_command_run(tmp_path, "a")
    assert re.fullmatch(r"a-[0-9a-f]{32}", run_id)
    assert last_run_id(folder) is None
