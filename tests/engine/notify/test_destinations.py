"""URLs come from variables and from files that only this user can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.notify.destinations import MAX_DESTINATIONS, has_destinations, read_destinations, user_file
from support.messages import has_problem

SECRET = "ntfy://topic-hunter2"  # noqa: S105 (made up)


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    user_file().parent.mkdir(parents=True)
    return user_file()


def make_url_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_variables_and_files_give_labels_without_urls(tmp_path: Path, settings: Path) -> None:
    file = make_url_file(tmp_path / "urls", f"# mine\n\n{SECRET}\njson://localhost\n")
    make_url_file(settings, "json://localhost/all\n")
    found = read_destinations(["env:NTFY", f"file:{file}"], {"NTFY": "ntfy://other"})
    assert found.problems == []
    assert [item.label for item in found.found] == [
        "env:NTFY",
        f"file:{file} line 3",
        f"file:{file} line 4",
        f"{settings} line 1",
    ]
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    file = make_url_file(tmp_path / "urls", SECRET, mode)
    found = read_destinations([f"file:{file}"])
    assert found.found == []
    assert len(found.problems) == 1
    assert has_problem(found.problems, "foreign-readable", "", f"file:{file}", f"chmod 600 {file}")


def test_file_in_folder_that_others_can_write_to_is_not_used_for_all_runs(settings: Path) -> None:
    make_url_file(settings, SECRET)
    settings.parent.chmod(0o777)
    found = read_destinations([])
    assert found.found == []
    assert has_problem(found.problems, "foreign-writable", "", settings, "XDG_CONFIG_HOME")


@pytest.mark.parametrize("text", ["-----BEGIN PRIVATE KEY-----\nhunter2\n", "hunter2", "ntfy://a b hunter2"])
def test_lines_that_are_no_url_are_named_by_number_only(tmp_path: Path, text: str) -> None:
    file = make_url_file(tmp_path / "id_rsa", text)
    found = read_destinations([f"file:{file}"])
    assert found.found == []
    assert found.problems
    assert "hunter2" not in str(found.problems)


def test_unusable_references_are_reported(tmp_path: Path) -> None:
    folder, empty = tmp_path / "folder", make_url_file(tmp_path / "empty", "# nothing\n")
    folder.mkdir(mode=0o700)
    found = read_destinations(
        ["env:UNSET", "env:BLANK", "file:/nowhere", f"file:{folder}", f"file:{empty}"], {"BLANK": " "}
    )
    assert found.found == []
    assert [problem.code for problem in found.problems] == [
        *("missing-value", "missing-value", "not-readable", "not-readable", "missing-value")
    ]
    assert has_problem(found.problems, "missing-value", "", "env:UNSET", "export UNSET=URL")
    assert has_problem(found.problems, "missing-value", "", f"file:{empty}")


def test_same_url_is_used_once_and_their_number_is_bounded(tmp_path: Path) -> None:
    assert len(read_destinations(["env:A", "env:B"], {"A": SECRET, "B": SECRET}).found) == 1
    file = make_url_file(tmp_path / "many", "".join(f"json://host{number}\n" for number in range(30)))
    found = read_destinations([f"file:{file}"])
    assert len(found.found) == MAX_DESTINATIONS
    assert len(found.problems) == 1 and has_problem(found.problems, "too-many", "", MAX_DESTINATIONS, 30)


def test_run_without_references_and_file_has_no_destinations(settings: Path) -> None:
    assert not has_destinations([])
    assert has_destinations(["env:A"])
    make_url_file(settings, SECRET)
    assert has_destinations([])
