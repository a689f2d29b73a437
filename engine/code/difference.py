"""The difference of code between two runs: git compares a tree of each, in a temporary store of objects.

`gputrain compare` shows it. Code is text of others: it is escaped and bounded, and a diff of somebody else's run is
applied to an index alone, where git checks its paths.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.code.git import GitError, Repository, find_repository, run_git
from engine.code.record import PATCH_FILE, UNTRACKED_FOLDER, CodeRecord, read_code_record
from engine.code.state import MAX_FILE_BYTES, MAX_UNTRACKED_FILES, is_below, is_code
from engine.runs.folder import RunFolder
from engine.utils.files import read_bytes
from engine.utils.text import printable

MAX_PATCH_BYTES = 1 << 24
MAX_LINE_CHARACTERS = 300
MAX_LINES = 60
NO_PROGRAMS = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames")


@dataclass(frozen=True)
class CodeText:
    """Printable lines about a difference, and how many more there are."""

    title: str
    lines: tuple[str, ...]
    more: int = 0


@dataclass(frozen=True)
class StoredCode:
    """The code that a run has recorded."""

    folder: RunFolder
    record: CodeRecord

    @property
    def patch(self) -> bytes:
        """The diff of the tracked files; b"" if it cannot be read."""
        with suppress(OSError):
            return read_bytes(self.folder.code / PATCH_FILE, MAX_PATCH_BYTES)
        return b""

    def untracked(self) -> Iterator[tuple[str, bytes]]:
        """Yield path and content of the untracked files of code. No link is followed."""
        home = Path(os.path.realpath(self.folder.code)) / UNTRACKED_FOLDER
        for path in [path for path in self.record.digests.untracked if is_code(path)][:MAX_UNTRACKED_FILES]:
            if is_below(path) and os.path.realpath(home / path) == str(home / path):
                with suppress(OSError):
                    yield path, read_bytes(home / path, MAX_FILE_BYTES)


def code_differences(runs: Sequence[object], reference: int) -> Iterator[CodeText]:
    """Yield how the code of each run differs from that of the run with the index `reference`.

    Runs of other programs have no recorded code."""
    codes = [_read_stored_code(run) if isinstance(run, RunFolder) else None for run in runs]
    if (first := codes[reference]) is None:
        return
    for code in codes:
        if code is not None and code.record.digests.fingerprint != first.record.digests.fingerprint:
            lines = [line.replace("\t", "    ")[:MAX_LINE_CHARACTERS] for line in _compare(first, code)]
            title = printable(f"Code of {code.folder.name} against {first.folder.name}")
            yield CodeText(title, tuple(map(printable, lines[:MAX_LINES])), max(len(lines) - MAX_LINES, 0))


def _read_stored_code(folder: RunFolder) -> StoredCode | None:
    record = read_code_record(folder)
    return None if record is None else StoredCode(folder, record)


def _compare(first: StoredCode, second: StoredCode) -> list[str]:
    before, after = first.record.digests, second.record.digests
    lines = []
    if before.commit != after.commit:
        lines.append(f"commit {after.commit or 'none'} in place of {before.commit or 'none'}")
    unstored = before.skipped.keys() | after.skipped.keys()
    differing = (path for path in sorted(unstored) if before.changed.get(path) != after.changed.get(path))
    lines += [f"{path}: differs, and is not stored" for path in differing]
    with tempfile.TemporaryDirectory(prefix="gputrain-code-") as name:
        place = Path(name)
        try:
            repository = _find_commits(first, second)
            trees = [_write_tree(place / side, code, repository) for side, code in (("a", first), ("b", second))]
            variables = _object_variables(place / "b", repository, place / "a" / "objects")
            output = run_git(
                ["diff", "--src-prefix=a/", "--dst-prefix=b/", *NO_PROGRAMS, *trees],
                repository.root,
                b"",
                (0,),
                variables,
            )
        except (GitError, OSError) as error:
            lines += [str(error), "In its place, the recorded changes since the commits are compared:"]
            for side, code in (("recorded-a", first), ("recorded-b", second)):
                for path, content in ((PATCH_FILE, code.patch), *code.untracked()):
                    (place / side / path).parent.mkdir(parents=True, exist_ok=True)
                    (place / side / path).write_bytes(content)
            names = ["diff", "--no-index", "--no-prefix", *NO_PROGRAMS, "recorded-a", "recorded-b"]
            # Exit code 1: they differ.
            output = run_git(names, place, b"", (0, 1), {})
    return lines + output.decode(errors="replace").splitlines()


def _find_commits(first: StoredCode, second: StoredCode) -> Repository:
    """Return a repository of the user's own runs that has the commits of both runs. Raises GitError."""
    own = [code for code in (first, second) if code.folder.is_own]
    if not own:
        # Somebody else's run does not choose where git reads.
        raise GitError("No repository is read: both runs belong to other users", code="foreign-owner")
    failure = GitError(f"{own[-1].record.root} is no repository with both commits any more", code="not-found")
    for place in [Path(code.record.root) for code in own] + [code.folder.path for code in own]:
        if (repository := find_repository(place)) is None:
            continue
        try:
            for code in (first, second):
                if commit := code.record.digests.commit:
                    repository.read("rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}")
            return repository
        except GitError as error:
            failure = GitError(f"{repository.root} {error}", code=error.code)
    raise failure


def _write_tree(place: Path, code: StoredCode, repository: Repository) -> str:
    """Write the code of a run as a tree of git to a folder with objects of its own, and return the ID of the tree.

    git refuses paths that lead out. Raises GitError and OSError."""
    (place / "objects").mkdir(parents=True)
    digests, variables = code.record.digests, _object_variables(place, repository)

    def git(*arguments: str, stdin: bytes = b"") -> str:
        return os.fsdecode(run_git(arguments, repository.root, stdin, (0,), variables)).strip()

    git("read-tree", digests.commit or "--empty")
    if patch := code.patch:
        skipped = [f"--exclude={path}" for path in digests.skipped if path in digests.changed]
        git("apply", "--cached", "--whitespace=nowarn", *skipped, "-", stdin=patch)
    for path, content in code.untracked():
        blob = git("hash-object", "-w", "--no-filters", "--stdin", stdin=content)
        git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
    return git("write-tree")


def _object_variables(place: Path, repository: Repository, *others: Path) -> dict[str, str]:
    """Return the variables with which git reads the objects of a repository, and writes to a folder in its place."""
    objects = os.fsdecode(repository.read("rev-parse", "--git-path", "objects")).strip()
    alternates = map(str, (repository.root / objects, *others))
    return {
        "GIT_INDEX_FILE": str(place / "index"),
        "GIT_OBJECT_DIRECTORY": str(place / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.pathsep.join(alternates),
    }
