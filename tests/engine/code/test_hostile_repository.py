"""A repository that somebody else has packed: its config, attributes and index run nothing and write nothing."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from engine.code.git import GitError, find_repository
from engine.code.record import copy_code
from engine.code.state import read_code
from support.repositories import file_contents, git, make_repository, write_files

PROGRAMS = {
    "core.fsmonitor": "{program}",
    "core.hooksPath": "{folder}/hooks",
    "core.pager": "{program}",
    "core.sshCommand": "{program}",
    "core.gitProxy": "{program}",
    "core.askPass": "{program}",
    "core.editor": "{program}",
    "diff.external": "{program}",
    "diff.evil.command": "{program}",
    "diff.evil.textconv": "{program}",
    "filter.evil.clean": "{program}",
    "filter.evil.smudge": "{program}",
    "filter.process.process": "{program}",
    "filter.process.required": "true",
    "gpg.program": "{program}",
    "log.showSignature": "true",
    "interactive.diffFilter": "{program}",
    "credential.helper": "!{program}",
    "extensions.partialClone": "origin",
    "remote.origin.promisor": "true",
    "remote.origin.url": "ext::{program} %S",
    "protocol.ext.allow": "always",
    "uploadpack.packObjectsHook": "{program}",
    "alias.diff-index": "!{program}",
    "alias.ls-files": "!{program}",
    "pager.diff-index": "{program}",
    "trace2.eventTarget": "{folder}/written",
}
HOOKS = ("post-index-change", "post-checkout", "reference-transaction", "fsmonitor-watchman", "query-watchman")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


@pytest.fixture
def root(tmp_path: Path, marker: Path) -> Path:
    """A repository in whose config each value that can be a program is one, with changed and untracked files."""
    folder = tmp_path / "work"
    attributes = "*.py filter=evil diff=evil\n*.c filter=process\n*.txt diff=evil\n"
    make_repository(folder, __gitattributes=attributes, a__py="1\n", b__c="1\n", d__txt="1\n")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $0 $@ >> {marker}\ncat\n")
    program.chmod(0o755)
    (tmp_path / "hooks").mkdir()
    for hook in HOOKS:
        for hooks in (tmp_path / "hooks", folder / ".git" / "hooks"):
            hooks.mkdir(exist_ok=True)
            (hooks / hook).write_text(program.read_text())
            (hooks / hook).chmod(0o755)
    for name, value in PROGRAMS.items():
        git(folder, "config", name, value.format(program=program, folder=tmp_path))
    write_files(folder, a__py="2\n", b__c="2\n", d__txt="2\n", e__py="new\n")
    marker.unlink(missing_ok=True)
    return folder


def test_programs_in_the_config_of_a_repository_do_not_run(root: Path, marker: Path, tmp_path: Path) -> None:
    repository = find_repository(root)
    assert repository is not None
    state = read_code(repository)
    copy_code(repository, tmp_path / "copy", tmp_path / "runs")
    assert not marker.exists() and not (tmp_path / "written").exists()
    assert {*state.digests.changed} == {"a.py", "b.c", "d.txt"}
    # Content that a filter encrypts must not be stored as it is.
    assert state.patch.count(b"diff --git ") == 1 and {*state.digests.skipped} >= {"a.py", "b.c"}


def test_reading_writes_nothing_into_the_repository(root: Path) -> None:
    (root / "d.txt").touch()
    before = file_contents(root / ".git")
    repository = find_repository(root)
    assert repository is not None
    read_code(repository)
    assert file_contents(root / ".git") == before


def test_filter_that_cannot_be_disabled_is_refused(root: Path, marker: Path) -> None:
    git(root, "config", "filter.a=b.clean", "touch executed")
    repository = find_repository(root)
    assert repository is not None
    with pytest.raises(GitError) as refused:
        read_code(repository)
    assert refused.value.code == "not-supported" and not marker.exists()


def test_working_tree_elsewhere_is_not_read(root: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    write_files(tmp_path / "home", diary__txt="PRIVATE")
    git(root, "config", "core.worktree", str(tmp_path / "home"))
    repository = find_repository(root)
    assert repository is not None
    assert "diary.txt" not in read_code(repository).digests.untracked


def test_index_with_paths_that_lead_out_is_neither_read_nor_copied(tmp_path: Path) -> None:
    root, outside = make_repository(tmp_path / "work", ab__c="1\n"), tmp_path / "p"
    outside.write_text("PRIVATE")
    _rename_in_index(root / ".git" / "index", b"ab.c", b"../p")
    repository = find_repository(root)
    assert repository is not None
    (tmp_path / "target").mkdir()
    copy_code(repository, tmp_path / "target" / "copy", tmp_path / "runs")
    assert not (tmp_path / "target" / "p").exists()
    assert "../p" not in read_code(repository).digests.changed


def _rename_in_index(index: Path, name: bytes, other: bytes) -> None:
    """Replace a path in an index file by one of the same length (gitformat-index(5))."""
    data = index.read_bytes()[:-20]
    place = data.index(name + b"\0")
    data = data[:place] + other + data[place + len(name) :]
    # Without extensions, such as the tree that names the path, too.
    end = 12 + (62 + len(name)) // 8 * 8 + 8
    data = data[: min(end, len(data))]
    assert struct.unpack(">4sLL", data[:12])[2] == 1
    index.write_bytes(data + hashlib.sha1(data, usedforsecurity=False).digest())
