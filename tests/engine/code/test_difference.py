"""The difference of code between two runs, and what a page shows of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.code.data import data_fingerprint
from engine.code.difference import CodeText, code_differences, code_texts
from engine.code.record import capture_code
from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from support.repositories import git, make_repository, write_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "work", train__py="lr = 1\n")


def make_run(root: Path, name: str) -> RunFolder:
    folder = RunFolder(root.parent / "runs" / name)
    folder.path.mkdir(parents=True)
    assert capture_code(folder, root) is not None
    return folder


def difference(first: RunFolder, second: RunFolder, max_lines: int = 100) -> CodeText | None:
    return next(code_differences([first, second], 0, max_lines), None)


def test_runs_of_the_same_code_have_no_difference(root: Path) -> None:
    assert difference(make_run(root, "a"), make_run(root, "b")) is None


def test_difference_names_commits_files_and_lines(root: Path) -> None:
    first = make_run(root, "a")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "second")
    write_files(root, train__py="lr = 2\n", new__py="x\n")
    text = difference(first, make_run(root, "b"))
    assert text is not None and "a" in text.title and "b" in text.title
    assert text.lines[0].startswith("commit ")
    assert {"new.py", "+x", "train.py", "++lr = 2"} <= {*text.lines}


def test_difference_is_bounded_and_escaped(root: Path) -> None:
    first = make_run(root, "a")
    write_files(root, new__py="\x1b[31mred\u202e\n" * 50)
    text = difference(first, make_run(root, "b"), 10)
    assert text is not None and (len(text.lines), text.more > 0) == (10, True)
    assert all(line.isprintable() for line in text.lines)


def test_binary_change_is_named(root: Path) -> None:
    first = make_run(root, "a")
    (root / "w.bin").write_bytes(b"\0\1")
    git(root, "add", "w.bin")
    text = difference(first, make_run(root, "b"))
    assert text is not None and len(text.lines) == 1 and "w.bin" in text.lines[0]


def test_page_hides_what_looks_like_a_secret(root: Path) -> None:
    write_files(root, train__py="api_key = 'abcdefgh123'\n")
    [text] = code_texts([make_run(root, "a")])
    assert any("api_key" in line for line in text.lines)
    assert not any("abcdefgh123" in line for line in text.lines)


def test_recorded_code_is_private_and_survives_damage(root: Path) -> None:
    write_files(root, new__py="x\n")
    folder = make_run(root, "a")
    modes = {path.stat().st_mode & 0o077 for path in (folder.code, *folder.code.rglob("*"))}
    assert modes == {0}
    (folder.code / "untracked" / "new.py").unlink()
    (folder.code / "changes.patch").unlink()
    assert code_texts([folder])[0].lines
    (folder.code / "code.json").write_text("{")
    assert code_texts([folder]) == []


def test_data_fingerprint_follows_names_sizes_and_times(tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    write_files(tmp_path / "data" / "sub", x__txt="a")
    first = data_fingerprint([tmp_path / "data"])
    assert data_fingerprint([tmp_path / "data"]) == first != data_fingerprint([tmp_path / "data" / "sub"])
    write_files(tmp_path / "data" / "sub", x__txt="ab")
    second = data_fingerprint([tmp_path / "data"])
    (tmp_path / "data" / "loop").symlink_to(tmp_path)
    assert len({first, second, data_fingerprint([tmp_path / "data"])}) == 3
    with pytest.raises(UsageError):
        data_fingerprint([tmp_path / "missing"])
