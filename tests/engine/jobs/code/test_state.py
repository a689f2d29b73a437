"""The recorded state of a working tree: commit, changes, untracked text files, and skipped files."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
from pathlib import Path

import pytest

from engine.jobs.code import git as git_module
from engine.jobs.code import state as state_module
from engine.jobs.code.git import GitError, find_repository
from engine.jobs.code.record import copy_code
from engine.jobs.code.state import CodeState, is_code, is_output, read_code
from support.repositories import add_submodule, file_contents, git, make_repository, write_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "work", train__py="a = 1\n", model__py="b = 1\n")


def read(root: Path, runs_dir: Path | None = None) -> CodeState:
    repository = find_repository(root)
    assert repository is not None
    return read_code(repository, runs_dir)


def test_recorded_diff_applies_to_the_commit(root: Path, tmp_path: Path) -> None:
    write_files(root, train__py="a = 2\n")
    (root / "model.py").unlink()
    (root / "weights.bin").write_bytes(bytes(range(256)))
    git(root, "add", "weights.bin")
    patch = read(root).patch
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(root), str(clone))
    subprocess.run(["git", "apply", "--index", "-"], cwd=clone, input=patch, check=True)
    assert (clone / "train.py").read_text() == "a = 2\n"
    assert (clone / "weights.bin").read_bytes() == bytes(range(256)) and not (clone / "model.py").exists()


def test_untracked_text_is_recorded_and_data_is_not(root: Path) -> None:
    write_files(root, new__py="c = 1\n", metrics__csv="step,loss\n", __gitignore="ignored.py\n", ignored__py="")
    (root / "model.bin").write_bytes(b"\0\1")
    (root / "pipe").touch()
    os.mkfifo(root / "named_pipe")
    state = read(root)
    assert {*state.untracked} == {"new.py", ".gitignore", "pipe"}
    assert state.untracked["new.py"] == b"c = 1\n"


def test_untracked_files_have_a_limit_and_programs_come_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "MAX_UNTRACKED_FILES", 1)
    monkeypatch.setattr(state_module, "MAX_FILE_BYTES", 10)
    write_files(root, a__txt="x", b__py="y", c__py="y" * 11)
    state = read(root)
    assert [*state.untracked] == ["b.py"]
    assert {*state.digests.skipped} == {"a.txt", "c.py"}


def test_files_of_runs_do_not_count(root: Path) -> None:
    before = read(root, root / "runs [1]").digests.fingerprint
    (root / "runs [1]").mkdir()
    write_files(root / "runs [1]", config__yaml="x")
    assert read(root, root / "runs [1]").digests.fingerprint == before != read(root).digests.fingerprint


@pytest.mark.parametrize(
    "name",
    [".env.local", "id_rsa", "server.pem", ".netrc", "credentials.json", "hf_token", "secrets.py"],
)
def test_file_with_the_name_of_a_secret_is_skipped(root: Path, name: str) -> None:
    (root / name).write_text("PASSWORD")
    state = read(root)
    assert not state.untracked and [*state.digests.skipped] == [name]


@pytest.mark.parametrize("name", ["tokenizer.py", "token.py", "keys.h", "monkey.txt", "environment.yml", "keyboard.md"])
def test_program_with_a_similar_name_is_recorded(root: Path, name: str) -> None:
    (root / name).write_text("x")
    assert [*read(root).untracked] == [name]


def test_tracked_secret_is_not_in_the_diff_but_its_change_is_noticed(root: Path) -> None:
    make_repository(root, __env="A=1\n")
    before = read(root).digests.fingerprint
    write_files(root, __env="A=HIDDEN\n")
    state = read(root)
    assert b"HIDDEN" not in state.patch and [*state.digests.skipped] == [".env"]
    assert state.digests.fingerprint != before


def test_private_key_is_skipped_whatever_its_name(root: Path) -> None:
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"
    write_files(root, notes__txt=key, train__py=key)
    state = read(root)
    assert not state.patch and not state.untracked and {*state.digests.skipped} == {"notes.txt", "train.py"}


def test_repository_without_a_commit_has_its_staged_files(tmp_path: Path) -> None:
    root = tmp_path / "new"
    root.mkdir()
    git(root, "init", "--quiet")
    write_files(root, train__py="a\n", other__py="b\n")
    git(root, "add", "train.py")
    state = read(root)
    assert (state.digests.commit, [*state.digests.changed], [*state.untracked]) == ("", ["train.py"], ["other.py"])


def test_folder_outside_of_git_and_a_bare_repository_have_no_code(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--bare", "bare.git")
    assert find_repository(tmp_path) is None and find_repository(tmp_path / "bare.git") is None


def test_edit_of_a_file_with_an_unusual_name_is_recorded(root: Path) -> None:
    for name in ('we ird"\\.py', "tab\there.py", "größe.py", os.fsdecode(b"latin-\xe9.py")):
        (root / name).write_text("x\n")
    git(root, "add", "--all")
    state = read(root)
    assert (len(state.digests.changed), state.patch.count(b"\n+x\n")) == (4, 4)


def test_submodule_is_recorded_by_its_commit(root: Path, tmp_path: Path) -> None:
    add_submodule(root, tmp_path / "inner")
    clean = read(root)
    assert not clean.digests.is_dirty
    write_files(root / "inner", lib__py="y\n")
    git(root / "inner", "commit", "--quiet", "--all", "--message", "second")
    assert b"Subproject commit" in read(root).patch
    assert read(root).digests.fingerprint != clean.digests.fingerprint


def test_what_runs_write_beside_the_code_does_not_count(root: Path) -> None:
    before = read(root)
    write_files(root, out__txt="1\n", results__csv="1\n", run__log="1\n", metrics__json="{}\n")
    (root / "model.pt").write_bytes(b"\0")
    after = read(root)
    assert after.digests.fingerprint == before.digests.fingerprint and not after.digests.is_dirty
    # A program may read it, so it is stored.
    assert {*after.untracked} == {"out.txt", "metrics.json"}


def test_repository_of_settings_does_not_list_the_home_folder(root: Path) -> None:
    git(root, "config", "status.showUntrackedFiles", "no")
    write_files(root, diary__txt="private")
    assert not read(root).untracked


def test_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("PRIVATE")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    state = read(root)
    assert not state.untracked and [*state.digests.skipped] == ["link.txt"]


def test_git_that_does_not_answer_is_ended(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(git_module, "TIMEOUT_SECONDS", 0.1)
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    with pytest.raises(GitError) as refused:
        read(root)
    assert refused.value.code == "timed-out"


@pytest.mark.parametrize(
    "path",
    ["train.py", "conf/model.yaml", "ds_config.json", "Makefile", "requirements-dev.txt", "kernel.so", "results.py"],
)
def test_programs_configs_and_unknown_kinds_count(path: str) -> None:
    assert is_code(path) and not is_output(path)


@pytest.mark.parametrize(
    "path", ["out.txt", "NOTES.md", "results.json", "eval/test-metrics.yaml", "plot.PNG", "model.pt", "output"]
)
def test_texts_data_and_results_do_not_count(path: str) -> None:
    assert not is_code(path)


@pytest.mark.parametrize("path", ["results.csv", "train.log", "slurm-1.out", "wandb/run/a.py", "a/.hydra/config.yaml"])
def test_logs_and_tables_are_not_even_recorded(path: str) -> None:
    assert is_output(path)


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
def hostile(tmp_path: Path, marker: Path) -> Path:
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


def test_programs_in_the_config_of_a_repository_do_not_run(hostile: Path, marker: Path, tmp_path: Path) -> None:
    repository = find_repository(hostile)
    assert repository is not None
    state = read_code(repository)
    copy_code(repository, tmp_path / "copy", tmp_path / "runs")
    assert not marker.exists() and not (tmp_path / "written").exists()
    assert {*state.digests.changed} == {"a.py", "b.c", "d.txt"}
    # Content that a filter encrypts must not be stored as it is.
    assert state.patch.count(b"diff --git ") == 1 and {*state.digests.skipped} >= {"a.py", "b.c"}


def test_reading_writes_nothing_into_the_repository(hostile: Path) -> None:
    (hostile / "d.txt").touch()
    before = file_contents(hostile / ".git")
    repository = find_repository(hostile)
    assert repository is not None
    read_code(repository)
    assert file_contents(hostile / ".git") == before


def test_filter_that_cannot_be_disabled_is_refused(hostile: Path, marker: Path) -> None:
    git(hostile, "config", "filter.a=b.clean", "touch executed")
    repository = find_repository(hostile)
    assert repository is not None
    with pytest.raises(GitError) as refused:
        read_code(repository)
    assert refused.value.code == "not-supported" and not marker.exists()


def test_working_tree_elsewhere_is_not_read(hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    write_files(tmp_path / "home", diary__txt="PRIVATE")
    git(hostile, "config", "core.worktree", str(tmp_path / "home"))
    repository = find_repository(hostile)
    assert repository is not None
    assert "diary.txt" not in read_code(repository).digests.untracked


def test_index_with_paths_that_lead_out_is_neither_read_nor_copied(tmp_path: Path) -> None:
    hostile, outside = make_repository(tmp_path / "work", ab__c="1\n"), tmp_path / "p"
    outside.write_text("PRIVATE")
    _rename_in_index(hostile / ".git" / "index", b"ab.c", b"../p")
    repository = find_repository(hostile)
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
