"""Renaming, deleting, restoring: names, owners, live runs, races with a resume, links, and a trash that is planted."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest

from engine.base.errors import Problem, UsageError
from engine.runs import ownership
from engine.runs.find import find_run, newest_first
from engine.runs.folder import RunFolder, list_runs
from engine.runs.manage import (
    delete_for_good,
    find_in_trash,
    find_own_run,
    list_trash,
    move_to_trash,
    rename_run,
    restore_run,
    run_contents,
)
from engine.runs.ownership import Ownership, claim_run, locked_ended_run
from support.messages import has_problem, raises_problem
from support.runs.factories import make_ended_runs, make_run_folder, write_run_record

COUNT = 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in make_ended_runs(tmp_path / "runs", COUNT):
        write_run_record(folder)
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def short_wait_for_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership.time, "sleep", lambda seconds: None)


def names(root: Path) -> list[str]:
    return [run.name for run in newest_first(list_runs(root))]


def test_rename_keeps_order(root: Path) -> None:
    renamed = rename_run(RunFolder(root / "run-1"), "best")
    assert (renamed.name, names(root)) == ("best", ["run-3", "run-2", "best", "run-0"])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("run-2", "name-in-use"),
        ("sweep", "name-in-use"),
        ("last", "invalid-name"),
        ("../x", "invalid-name"),
        ("x\n", "invalid-name"),
    ],
)
def test_rename_refuses_taken_and_invalid_names(root: Path, name: str, code: str) -> None:
    (root / "sweep").mkdir()
    with raises_problem(code, name):
        rename_run(RunFolder(root / "run-1"), name)
    assert sorted(names(root)) == ["run-0", "run-1", "run-2", "run-3"] and list((root / "sweep").iterdir()) == []


def test_live_run_is_neither_renamed_nor_deleted(root: Path) -> None:
    folder = RunFolder(root / "run-1")
    owner = Ownership(folder)
    for act in (lambda: rename_run(folder, "best"), lambda: move_to_trash(folder)):
        with raises_problem("already-running", "run-1", "`gputrain stop run-1`"):
            act()
    owner.release()
    move_to_trash(folder)
    assert "run-1" not in names(root)


def test_foreign_run_is_neither_renamed_nor_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(root / "run-1")
    folder.path.chmod(0o777)
    with pytest.raises(UsageError) as refused:
        rename_run(folder, "best")
    assert has_problem(refused.value.problems, "foreign-writable", str(folder.path), f"`chmod -R go-w {folder.path}`")
    assert "--trust-owner" not in str(refused.value), "the command has no such option"
    monkeypatch.setattr("engine.runs.folder.os.geteuid", lambda: 12345)
    with raises_problem("foreign-owner", "run-1"):
        move_to_trash(folder)
    assert len(names(root)) == COUNT


def test_resume_that_waits_for_lock_of_deleted_run_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is deleted after the resume has opened its folder, and before it has the lock."""
    deleted: list[str] = []

    def delete_first(seconds: float) -> None:
        if not deleted:
            deleted.append("run-1")
            moved.set()
            done.wait(10)

    moved, done = threading.Event(), threading.Event()
    with locked_ended_run(RunFolder(root / "run-1")):
        monkeypatch.setattr(ownership.time, "sleep", delete_first)
        problems: list[Problem] = []

        def resume() -> None:
            try:
                claim_run(root, "run-1", "run", resume=True)
            except UsageError as error:
                problems.extend(error.problems)

        thread = threading.Thread(target=resume)
        thread.start()
        assert moved.wait(10)
        (root / ".trash").mkdir(0o700)
        (root / "run-1").rename(root / ".trash" / "run-1")
    done.set()
    thread.join()
    assert len(problems) == 1
    assert [run.entry for run in list_trash(root)] == ["run-1"]
    delete_for_good(list_trash(root)[0])


def test_deleted_run_is_in_no_list_and_is_restored_with_all_files(root: Path) -> None:
    before = {path.name: path.read_bytes() for path in (root / "run-3").iterdir()}
    assert find_run(root, "last").name == "run-3"
    trashed = move_to_trash(RunFolder(root / "run-3"))
    assert find_run(root, "last").name == "run-2" and "run-3" not in names(root)
    with raises_problem("unknown-run", "run-3"):
        find_own_run(root, "run-3")
    folder = restore_run(root, trashed)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before | {".lock": mock.ANY}
    assert names(root)[0] == "run-3" and list_trash(root) == []


def test_runs_of_one_name_are_numbered_in_the_trash(root: Path) -> None:
    move_to_trash(RunFolder(root / "run-1"))
    make_run_folder(root, "run-1")
    second = move_to_trash(RunFolder(root / "run-1"))
    assert (second.name, second.entry) == ("run-1", "run-1~2")
    assert sorted(run.entry for run in list_trash(root)) == ["run-1", "run-1~2"]
    assert restore_run(root, find_in_trash(root, "run-1~2")).name == "run-1"
    with raises_problem("name-in-use", "run-1", "`gputrain runs restore run-1 NAME`"):
        restore_run(root, find_in_trash(root, "run-1"))
    assert restore_run(root, find_in_trash(root, "run-1"), "older").name == "older"


def test_emptied_trash_leaves_what_links_lead_to(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("keep")
    folder = RunFolder(root / "run-1")
    folder.checkpoints.symlink_to(outside)
    (folder.path / "log.txt").symlink_to(outside / "file")
    move_to_trash(find_own_run(root, "run-1"))
    (root / ".trash" / "run-2").symlink_to(outside)
    (root / ".trash" / "notes.txt").touch()
    assert [run.entry for run in list_trash(root)] == ["run-1"]
    delete_for_good(list_trash(root)[0])
    assert (outside / "file").read_text() == "keep"
    assert sorted(path.name for path in (root / ".trash").iterdir()) == ["notes.txt", "run-2"]


def test_run_that_was_resumed_in_the_trash_is_not_deleted(root: Path) -> None:
    trashed = move_to_trash(RunFolder(root / "run-1"))
    owner = Ownership(RunFolder(trashed.path))
    with raises_problem("already-running", "run-1"):
        delete_for_good(trashed)
    owner.release()
    with raises_problem("wrong-state", "run-1"):
        move_to_trash(RunFolder(trashed.path))
    delete_for_good(trashed)
    assert list_trash(root) == []


def test_trash_that_is_a_link_or_open_to_others_is_not_used(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / ".trash").symlink_to(tmp_path / "elsewhere")
    trashed = move_to_trash(RunFolder(root / "run-1"))
    assert trashed.path.parent == root / f".trash-{os.geteuid()}" and list_trash(root) == [trashed]
    trashed.path.parent.chmod(0o777)
    with raises_problem("foreign-writable", str(trashed.path.parent)):
        move_to_trash(RunFolder(root / "run-2"))
    with raises_problem("foreign-writable", str(trashed.path.parent)):
        delete_for_good(trashed)
    assert list_trash(root) == [] and "run-2" in names(root)


def test_move_between_file_systems_names_what_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link", str(source))

    monkeypatch.setattr(Path, "rename", refuse)
    with raises_problem("not-writable", "run-1", f"`rm -r {root / 'run-1'}`"):
        move_to_trash(RunFolder(root / "run-1"))
    monkeypatch.undo()
    assert list_trash(root) == [] and len(names(root)) == COUNT


def test_run_contents_counts_hard_links_once(root: Path) -> None:
    folder = RunFolder(root / "run-1")
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-00000010.pt").write_bytes(b"x" * 100_000)
    (folder.checkpoints / "last.pt").hardlink_to(folder.checkpoints / "step-00000010.pt")
    before = sum(path.stat().st_size for path in folder.path.iterdir() if path.is_file())
    contents = run_contents(folder.path)
    assert (contents.files, contents.size_bytes, contents.checkpoints) == (7, before + 100_000, 1)
    assert str(contents).startswith("7 files, ") and str(contents).endswith(", 1 checkpoint")
    shutil.rmtree(folder.path)
    assert run_contents(folder.path).files == 0
