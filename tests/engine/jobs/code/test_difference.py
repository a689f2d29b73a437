"""The difference of code between two runs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from engine.base.codec import replace, write_record
from engine.jobs.code.difference import CodeText, code_differences
from engine.jobs.code.record import capture_code, read_code_record
from engine.runs.folder import RunFolder
from support.repositories import file_contents, git, make_repository, write_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "work", train__py="lr = 1\n")


def make_run(root: Path, name: str) -> RunFolder:
    folder = RunFolder(root.parent / "runs" / name)
    folder.path.mkdir(parents=True)
    assert capture_code(folder, root) is not None
    return folder


def difference(first: RunFolder, second: RunFolder) -> CodeText | None:
    return next(code_differences([first, second], 0), None)


def test_runs_of_the_same_code_have_no_difference(root: Path) -> None:
    assert difference(make_run(root, "a"), make_run(root, "b")) is None


def test_difference_is_that_of_what_was_recorded_since_the_commits(root: Path) -> None:
    write_files(root, train__py="lr = 2\n", old__py="o\n", notes__txt="of a run\n")
    first = make_run(root, "a")
    git(root, "add", "train.py")
    git(root, "commit", "--quiet", "--message", "second")
    (root / "old.py").unlink()
    write_files(root, train__py="lr = 3\n", new__py="x\n")
    second = make_run(root, "b")
    root.rename(root.parent / "moved")
    text = difference(first, second)
    assert text is not None and "a" in text.title and "b" in text.title
    assert text.lines[0].startswith("commit ")
    assert {"-+lr = 2", "++lr = 3", "+x", "-o"} <= {*text.lines}
    # What runs write is no difference.
    assert not any("notes.txt" in line for line in text.lines)


def test_comparison_writes_nothing_to_the_repository_and_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(root, "config", "core.splitIndex", "true")
    first = make_run(root, "a")
    write_files(root, train__py="lr = 2\n")
    second = make_run(root, "b")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = file_contents(root)
    assert difference(first, second) is not None
    assert file_contents(root) == before and not [*(tmp_path / "temporary").iterdir()]


def test_link_in_a_recorded_diff_is_not_followed(root: Path) -> None:
    (root.parent / "secret").mkdir()
    write_files(root.parent / "secret", key="HIDDEN\n")
    first = make_run(root, "a")
    (root / "link").symlink_to("../secret")
    git(root, "add", "link")
    second = make_run(root, "b")
    record = read_code_record(second)
    assert record is not None
    content = second.code / "untracked"
    content.mkdir()
    (content / "sub").symlink_to(root.parent / "secret")
    untracked = dict.fromkeys(("link/key", "sub/key", "../../../../secret/key"), "1")
    write_record(
        second.code / "code.json", replace(record, digests=replace(record.digests, untracked=untracked)), private=True
    )
    text = difference(first, second)
    assert text is not None and not any("HIDDEN" in line for line in text.lines)


def test_unusual_names_and_contents_are_compared(root: Path) -> None:
    first = make_run(root, "a")
    for name in ("größe ä.py", 'q"uo\te.py', "tab\t.py", "empty.py", "crlf.py"):
        (root / name).write_bytes(b"" if name == "empty.py" else b"a\r\nb")
    git(root, "add", "empty.py", "tab\t.py")
    text = difference(first, make_run(root, "b"))
    assert text is not None and text.lines.count("+b") == 3 and "++b" in text.lines


def test_difference_is_bounded_and_escaped(root: Path) -> None:
    first = make_run(root, "a")
    write_files(root, new__py="\x1b[31mred\u202e\n" * 70)
    text = difference(first, make_run(root, "b"))
    assert text is not None and (len(text.lines), text.more > 0) == (60, True)
    assert all(line.isprintable() for line in text.lines)


def test_recorded_code_is_private_and_survives_damage(root: Path) -> None:
    first = make_run(root, "first")
    write_files(root, new__py="x\n")
    folder = make_run(root, "a")
    modes = {path.stat().st_mode & 0o077 for path in (folder.code, *folder.code.rglob("*"))}
    assert modes == {0}
    (folder.code / "untracked" / "new.py").unlink()
    (folder.code / "changes.patch").unlink()
    assert difference(first, folder) is not None
    (folder.code / "code.json").write_text("{")
    assert difference(first, folder) is None
