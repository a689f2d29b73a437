"""The difference of code between two runs.

Where the repository still has both commits, git compares the two states (`engine.code.trees`); otherwise what each run
had changed since its commit is compared. `gputrain compare` and `gputrain report --code` show it. Code is text of
others: it is escaped and bounded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import unified_diff
from functools import cached_property
from pathlib import Path

from engine.code.digests import CodeDigests
from engine.code.git import GitError, Repository, find_repository
from engine.code.kinds import is_code
from engine.code.patches import MAX_PATCH_BYTES, split_patch
from engine.code.record import PATCH_FILE, UNTRACKED_FOLDER, CodeRecord, read_code_record
from engine.code.state import MAX_FILE_BYTES, MAX_UNTRACKED_FILES, is_below
from engine.code.trees import ChangedFile, RecordedState, compare_states, has_commit
from engine.runs.folder import RunFolder
from engine.utils.files import open_regular_file, read_bytes
from engine.utils.redaction import redact_text
from engine.utils.text import pluralize, printable

# difflib takes a second for 5,000 lines that differ everywhere.
MAX_FILE_LINES = 2000
MAX_LINE_CHARACTERS = 300
MAX_LINES = 400
MAX_LISTED_FILES = 40
BINARY_MARK = b"\nGIT binary patch\n"


@dataclass(frozen=True)
class CodeText:
    """Printable lines about the code of a run or about a difference, and how many more there are."""

    title: str
    lines: tuple[str, ...]
    more: int = 0


class StoredCode:
    """The code that a run has recorded. Its files are read when they are needed."""

    def __init__(self, folder: RunFolder, record: CodeRecord) -> None:
        self.name, self.folder, self.record = folder.name, folder, record
        self._patches: Mapping[str, bytes] | None = None

    @cached_property
    def compared(self) -> Mapping[str, str]:
        """The digests of all files that count as code and differ from the commit."""
        return self.record.digests.compared

    @property
    def state(self) -> RecordedState:
        """What is stored of the code, without binary files and without what counts as no code."""
        patches = [patch for patch in self._read_patches().values() if BINARY_MARK not in patch]
        paths = [path for path in self.record.digests.untracked if is_code(path)][:MAX_UNTRACKED_FILES]
        contents = ((path, self._read_untracked(path)) for path in paths)
        untracked = {path: content for path, content in contents if content is not None}
        return RecordedState(self.record.digests.commit, patches, untracked)

    @property
    def repositories(self) -> Iterator[Repository]:
        """Where its commit may be. Only for own runs: somebody else's run does not choose where git reads."""
        for place in (Path(self.record.root), self.folder.path):
            if (repository := find_repository(place)) is not None:
                yield repository

    def lines_of(self, path: str) -> list[str] | None:
        """Return the diff of a file, or its lines if it is untracked; an empty list if the run has not changed it, and
        None if it is not stored as text."""
        if path not in self.compared:
            return []
        content = self._content(path)
        if content is None or BINARY_MARK in content:
            return None
        # The IDs of the content follow from the content.
        lines = content.decode(errors="replace").splitlines()
        return [line for line in lines if not line.startswith(("diff --git ", "index "))]

    def _content(self, path: str) -> bytes | None:
        return self._read_patches().get(path) if path in self.record.digests.changed else self._read_untracked(path)

    def _read_untracked(self, path: str) -> bytes | None:
        if path not in self.record.digests.untracked or not is_below(path):
            return None
        try:
            return _read_below(self.folder.code / UNTRACKED_FOLDER, path)
        except OSError:
            return None

    def _read_patches(self) -> Mapping[str, bytes]:
        if self._patches is None:
            self._patches = {}
            with suppress(OSError):
                stored = read_bytes(self.folder.code / PATCH_FILE, MAX_PATCH_BYTES)
                self._patches = split_patch(stored, list(self.record.digests.changed))
        return self._patches


def _read_below(folder: Path, path: str) -> bytes:
    """Return the content of a file below a folder. Raises OSError, also if a part of its path is a link."""
    *folders, name = path.split("/")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            os.close(handle)
            handle = inner
        with open_regular_file(name, MAX_FILE_BYTES, dir_fd=handle) as file:
            return file.read(MAX_FILE_BYTES)
    finally:
        os.close(handle)


def read_stored_code(folder: RunFolder) -> StoredCode | None:
    """Return the code that a run has recorded; None if it has none."""
    record = read_code_record(folder)
    return None if record is None else StoredCode(folder, record)


def compare_code(first: StoredCode, second: StoredCode, max_lines: int = MAX_LINES) -> CodeText | None:
    """Return how the code of the second run differs from that of the first; None if it does not."""
    before, after = first.record.digests, second.record.digests
    if before.fingerprint == after.fingerprint:
        return None
    title = f"Code of {second.name} against {first.name}"
    lines = [_commit_line(before, after)] if before.commit != after.commit else []
    try:
        lines += _compare_trees(first, second)
    except GitError as error:
        lines.append(str(error))
        lines.append("In its place, how the changes since the commits differ, as they are recorded:")
        for path in _differing(first, second):
            lines += _file_lines(first, second, path)
    if before.rest != after.rest:
        lines.append("Untracked files that are not recorded differ.")
    return _bounded(title, lines, max_lines)


def _compare_trees(first: StoredCode, second: StoredCode) -> list[str]:
    """Return the files that differ, and the diff between the code of two runs.

    Raises GitError, whose message names the repository, if there is none any more, or it cannot be read."""
    repository = _find_commits(first, second)
    try:
        found = compare_states(repository, first.state, second.state)
    except GitError as error:
        raise GitError(f"{repository.root} {error}", code=error.code) from error
    except OSError as error:
        raise GitError(f"{repository.root} cannot be compared: {error.strerror}") from error
    lines = list(map(_changed_line, found.files[:MAX_LISTED_FILES]))
    if len(found.files) > MAX_LISTED_FILES:
        lines.append(f"and {pluralize(len(found.files) - MAX_LISTED_FILES, 'more file')}")
    for path in _differing(first, second):
        if unread := [code for code in (second, first) if code.lines_of(path) is None]:
            code = next((each for each in unread if path in each.record.digests.skipped), unread[0])
            lines.append(f"{path}: differs; {_unshown(code, path)}")
    return lines + found.diff.decode(errors="replace").splitlines()


def _find_commits(first: StoredCode, second: StoredCode) -> Repository:
    """Return a repository that has the commits of both runs.

    Raises GitError, whose message names the repository."""
    own = [code for code in (first, second) if code.folder.is_own]
    if not own:
        raise GitError("No repository is read: both runs belong to other users", code="foreign-owner")
    failure = GitError(f"{own[-1].record.root} is no repository with both commits any more", code="not-found")
    for repository in dict.fromkeys(repository for code in own for repository in code.repositories):
        try:
            if all(has_commit(repository, code.record.digests.commit) for code in (first, second)):
                return repository
        except GitError as error:
            failure = GitError(f"{repository.root} {error}", code=error.code)
    raise failure


def _changed_line(file: ChangedFile) -> str:
    return f"{file.path}: {'binary' if file.added is None else f'+{file.added} -{file.deleted}'}"


def _differing(first: StoredCode, second: StoredCode) -> list[str]:
    before, after = first.compared, second.compared
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def code_differences(runs: Sequence[object], reference: int, max_lines: int = MAX_LINES) -> Iterator[CodeText]:
    """Yield how the code of each run differs from that of the run with the index `reference`.

    Runs of other programs have no recorded code."""
    codes = [read_stored_code(run) if isinstance(run, RunFolder) else None for run in runs]
    if (first := codes[reference]) is None:
        return
    for code in codes:
        if code is not None and (text := compare_code(first, code, max_lines)) is not None:
            yield text


def code_texts(runs: Sequence[object]) -> list[CodeText]:
    """Return what a page shows of the code of its runs: the code of the first one, and the differences from it.

    Pages are passed on, so what looks like a secret is hidden."""
    codes = (read_stored_code(run) for run in runs if isinstance(run, RunFolder))
    first = next((code for code in codes if code is not None), None)
    if first is None:
        return []
    own = [run for run in runs if isinstance(run, RunFolder) and run.name != first.name]
    texts = [describe_changes(first), *code_differences([first.folder, *own], 0)]
    return [replace(text, lines=tuple(map(redact_text, text.lines))) for text in texts]


def describe_changes(code: StoredCode, max_lines: int = MAX_LINES) -> CodeText:
    """Return the commit of a run, and what it had changed since."""
    lines = [f"commit {code.record.digests.commit or 'none'} in {code.record.root}"]
    for path in code.compared:
        if path in code.record.digests.modules and path not in code.record.digests.skipped:
            # A submodule as the commit has it.
            continue
        content = code.lines_of(path)
        lines += [f"{path}: {_unshown(code, path)}"] if content is None else [path, *content]
    return _bounded(f"Code of {code.name}", lines, max_lines)


def _commit_line(first: CodeDigests, second: CodeDigests) -> str:
    return f"commit {second.commit or 'none'} in place of {first.commit or 'none'}"


def _file_lines(first: StoredCode, second: StoredCode, path: str) -> Iterator[str]:
    before, after = first.lines_of(path), second.lines_of(path)
    if before is None or after is None:
        reason = _unshown(first if before is None else second, path)
        yield f"{path}: differs; {reason}"
        return
    if max(len(before), len(after)) > MAX_FILE_LINES:
        yield f"{path}: differs in {pluralize(max(len(before), len(after)), 'line')}, too many to compare"
        return
    yield path
    found = list(unified_diff(before, after, lineterm="", n=2))
    # The first two lines name two files, but both sides are runs.
    yield from found[2:] or ["the lines are the same, their order of bytes is not"]


def _unshown(code: StoredCode, path: str) -> str:
    return f"not stored: {code.record.digests.skipped.get(path, 'no text')}"


def _bounded(title: str, lines: list[str], max_lines: int) -> CodeText:
    shown = [printable(line.replace("\t", "    ")[:MAX_LINE_CHARACTERS]) for line in lines[:max_lines]]
    return CodeText(printable(title), tuple(shown), max(len(lines) - max_lines, 0))
