"""The copy of a working tree: what it contains, what it links to, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.jobs.code import record as copy_module
from engine.jobs.code.git import GitError, find_repository
from engine.jobs.code.record import copy_code
from support.messages import has_problem
from support.repositories import add_submodule, git, make_repository, write_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "work", train__py="a = 1\n", __gitignore="data/\n.env\n__pycache__/\n")


def copy(root: Path, runs_dir: Path | None = None) -> Path:
    repository = find_repository(root)
    assert repository is not None
    target = root.parent / "copy"
    copy_code(repository, target, runs_dir or root.parent / "runs")
    return target


def test_copy_has_changed_and_untracked_files_as_they_are_on_the_disk(root: Path) -> None:
    write_files(root, train__py="a = 2\n", new__py="b\n")
    (root / "script.sh").write_text("#!/bin/sh\n")
    (root / "script.sh").chmod(0o755)
    made = copy(root)
    assert (made / "train.py").read_text() == "a = 2\n" and (made / "new.py").read_text() == "b\n"
    assert (made / "script.sh").stat().st_mode & 0o111
    assert (made / "train.py").stat().st_mtime_ns == (root / "train.py").stat().st_mtime_ns
    write_files(root, train__py="a = 3\n")
    assert (made / "train.py").read_text() == "a = 2\n"


def test_ignored_paths_and_secrets_are_linked_and_caches_are_not(root: Path) -> None:
    for folder in ("data", "__pycache__"):
        (root / folder).mkdir()
        (root / folder / "x").touch()
    write_files(root, __env="A=1\n", id_rsa="key\n")
    made = copy(root)
    links = {path.name: path.readlink() for path in made.iterdir() if path.is_symlink()}
    assert links == {name: root / name for name in ("data", ".env", "id_rsa")}


def test_large_files_and_files_of_filters_are_linked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_module, "MAX_COPIED_FILE_BYTES", 100)
    git(root, "config", "filter.lfs.clean", "cat")
    write_files(root, weights__txt="x" * 101, model__bin="y", __gitattributes="*.bin filter=lfs\n")
    made = copy(root)
    assert (made / "weights.txt").is_symlink() and (made / "model.bin").is_symlink()


def test_copy_does_not_contain_the_runs(root: Path) -> None:
    (root / "out" / "runs" / "train-1").mkdir(parents=True)
    (root / "out" / "logs").mkdir()
    (root / "out" / "logs" / "x").touch()
    write_files(root, __gitignore="out/\n")
    made = copy(root, root / "out" / "runs")
    assert (made / "out" / "logs").is_symlink() and not (made / "out" / "runs").exists()


def test_link_within_the_tree_leads_to_the_copy_and_another_one_to_the_original(root: Path) -> None:
    (root / "inner.py").symlink_to("train.py")
    (root / "absolute.py").symlink_to(root / "train.py")
    (root / "outer").symlink_to("../data")
    made = copy(root)
    assert (made / "inner.py").readlink() == (made / "absolute.py").readlink() == Path("train.py")
    assert (made / "outer").readlink() == root.parent / "data"


def test_copy_has_untracked_files_that_the_settings_hide_and_what_replaced_a_file(root: Path) -> None:
    git(root, "config", "status.showUntrackedFiles", "no")
    write_files(root, new__py="x\n")
    (root / "train.py").unlink()
    (root / "train.py").mkdir()
    write_files(root / "train.py", part__py="y\n")
    made = copy(root)
    assert (made / "new.py").read_text() == "x\n"
    assert (made / "train.py" / "part.py").read_text() == "y\n" and not (made / "train.py").is_symlink()


def test_submodule_and_nested_repository_are_copied(root: Path, tmp_path: Path) -> None:
    add_submodule(root, tmp_path / "inner")
    make_repository(root / "nested", a__py="x\n", __gitignore="data/\n")
    (root / "nested" / "data").mkdir()
    made = copy(root)
    write_files(root / "inner", lib__py="y\n")
    assert (made / "inner" / "lib.py").read_text() == (made / "nested" / "a.py").read_text() == "x\n"
    assert (made / "nested" / "data").readlink() == root / "nested" / "data"


def test_submodule_without_its_repository_is_refused(root: Path, tmp_path: Path) -> None:
    add_submodule(root, tmp_path / "inner")
    (root / "inner" / ".git").unlink()
    with pytest.raises(GitError):
        copy(root)


def test_too_many_files_and_runs_above_the_repository_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as refused:
        copy(root, root)
    assert has_problem(refused.value.problems, "conflict", "run.snapshot")
    monkeypatch.setattr(copy_module, "MAX_COPIED_FILES", 1)
    with pytest.raises(UsageError) as refused:
        copy(root)
    assert has_problem(refused.value.problems, "too-large", "run.snapshot")
    assert not (root.parent / "copy").exists()
