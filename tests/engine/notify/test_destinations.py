"""URLs come from variables and from files that only this user can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.notify.sender import has_destinations, read_destinations, user_file
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
    make_url_file(settings, f"{SECRET}\njson://localhost/all\n")
    found, problems = read_destinations(["env:NTFY", f"file:{file}"], {"NTFY": "ntfy://other"})
    assert problems == []
    assert [item.label for item in found] == [
        "env:NTFY",
        f"file:{file} line 3",
        f"file:{file} line 4",
        f"file:{settings} line 2",
    ]
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    file = make_url_file(tmp_path / "urls", SECRET, mode)
    found, problems = read_destinations([f"file:{file}"])
    assert found == [] and len(problems) == 1
    assert has_problem(problems, "foreign-readable", "", f"file:{file}", f"chmod 600 {file}")


@pytest.mark.parametrize("text", ["-----BEGIN PRIVATE KEY-----\nhunter2\n", "ntfy://a b hunter2"])
def test_lines_that_are_no_url_are_named_by_number_only(tmp_path: Path, text: str) -> None:
    found, problems = read_destinations([f"file:{make_url_file(tmp_path / 'id_rsa', text)}"])
    assert found == [] and problems
    assert "hunter2" not in str(problems)


def test_line_that_is_no_url_leaves_the_others(tmp_path: Path) -> None:
    file = make_url_file(tmp_path / "urls", "ntfy://a\nno url\nntfy://b")
    found, problems = read_destinations([f"file:{file}"])
    assert [each.url for each in found] == ["ntfy://a", "ntfy://b"]
    assert len(problems) == 1


def test_unusable_references_are_reported(tmp_path: Path) -> None:
    empty = make_url_file(tmp_path / "empty", "# nothing\n")
    found, problems = read_destinations(["env:BLANK", "file:/nowhere", f"file:{empty}"], {"BLANK": " "})
    assert found == []
    assert [problem.code for problem in problems] == ["missing-value", "not-readable", "missing-value"]
    assert has_problem(problems, "missing-value", "", "env:BLANK", "export BLANK=URL")


def test_run_without_references_and_file_has_no_destinations(settings: Path) -> None:
    assert not has_destinations([])
    assert has_destinations(["env:A"])
    make_url_file(settings, SECRET)
    assert has_destinations([])
