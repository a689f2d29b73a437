"""The difference of code between two runs: git compares two folders with the files that differ.

`gputrain compare` and `gputrain report --code` show it. Code is text of others: it is escaped and bounded, and a diff
of somebody else's run is applied in a temporary folder, where git checks its paths.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from engine.code.git import GitError, Repository, find_repository, run_git
from engine.code.kinds import is_code
from engine.code.record import PATCH_FILE, UNTRACKED_FOLDER, CodeRecord, read_code_record
from engine.code.state import MAX_FILE_BYTES, MAX_UNTRACKED_FILES, is_below
from engine.runs.folder import RunFolder
from engine.utils.files import read_bytes
from engine.utils.redaction import redact_text
from engine.utils.text import printable

MAX_PATCH_BYTES = 1 << 24
MAX_LINE_CHARACTERS = 300
MAX_LINES = 400
# Files that are compared.
MAX_FILES = 1000
NO_PROGRAMS = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames")


@dataclass(frozen=True)
class CodeText:
    """Printable lines about the code of a run or about a difference, and how many more there are."""

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
            file = home / path
            if is_below(path) and os.path.realpath(file) == str(file):
                with suppress(OSError):
                    yield path, read_bytes(file, MAX_FILE_BYTES)


def code_differences(runs: Sequence[object], reference: int, max_lines: int = MAX_LINES) -> Iterator[CodeText]:
    """Yield how the code of each run differs from that of the run with the index `reference`.

    Runs of other programs have no recorded code."""
    codes = [_read_stored_code(run) if isinstance(run, RunFolder) else None for run in runs]
    if (first := codes[reference]) is None:
        return
    for code in codes:
        if code is not None and code.record.digests.fingerprint != first.record.digests.fingerprint:
            yield _bounded(f"Code of {code.folder.name} against {first.folder.name}", _compare(first, code), max_lines)


def code_texts(runs: Sequence[object]) -> list[CodeText]:
    """Return what a page shows of the code of its runs: the code of the first one, and the differences from it.

    Pages are passed on, so what looks like a secret is hidden."""
    codes = (_read_stored_code(run) for run in runs if isinstance(run, RunFolder))
    first = next((code for code in codes if code is not None), None)
    if first is None:
        return []
    own = [run for run in runs if isinstance(run, RunFolder) and run.name != first.folder.name]
    texts = [_describe_changes(first), *code_differences([first.folder, *own], 0)]
    return [replace(text, lines=tuple(map(redact_text, text.lines))) for text in texts]


def _read_stored_code(folder: RunFolder) -> StoredCode | None:
    record = read_code_record(folder)
    return None if record is None else StoredCode(folder, record)


def _describe_changes(code: StoredCode) -> CodeText:
    """Return the commit of a run, and what it had changed since."""
    digests = code.record.digests
    lines = [f"commit {digests.commit or 'none'} in {code.record.root}", *_lines(code.patch)]
    for path, content in code.untracked():
        lines += [path, *_lines(content)]
    lines += [f"{path}: not stored: {reason}" for path, reason in digests.skipped.items()]
    return _bounded(f"Code of {code.folder.name}", lines, MAX_LINES)


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
            paths = {*before.changed, *after.changed}
            if before.commit and after.commit and before.commit != after.commit:
                names = ("diff-tree", "-r", "-z", "--name-only", *NO_PROGRAMS, before.commit, after.commit)
                paths |= {*repository.lines(*names)}
            for side, code in (("a", first), ("b", second)):
                _write_state(place / side, code, repository, sorted(paths)[:MAX_FILES])
        except (GitError, OSError) as error:
            place = place / "recorded"
            lines += [str(error), "In its place, the recorded changes since the commits are compared:"]
            for side, code in (("a", first), ("b", second)):
                _write(place / side / PATCH_FILE, code.patch)
                _write_untracked(place / side, code)
        try:
            # Exit code 1: they differ.
            output = run_git(["diff", "--no-index", "--no-prefix", *NO_PROGRAMS, "a", "b"], place, b"", (0, 1), {})
        except GitError as error:
            return [*lines, str(error)]
    return lines + _lines(output)


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


def _write_state(folder: Path, code: StoredCode, repository: Repository, paths: Sequence[str]) -> None:
    """Write files as a run had them: those of its commit, with its diff, and untracked ones.

    Raises GitError and OSError."""
    folder.mkdir()
    digests = code.record.digests
    if digests.commit:
        named = [path for path in paths if "\n" not in path and is_below(path)]
        given = "".join(f"{digests.commit}:{path}\n" for path in named).encode(errors="surrogateescape")
        output = repository.read("cat-file", "--batch", stdin=given)
        for path in named:
            header, _, output = output.partition(b"\n")
            kind, _, size = header.rpartition(b" ")
            if not kind.endswith(b" blob"):
                continue
            content, output = output[: int(size)], output[int(size) + 1 :]
            _write(folder / path, content)
    if patch := code.patch:
        # git refuses paths that lead out, and what is behind a link.
        skipped = [f"--exclude={path}" for path in digests.skipped if path in digests.changed]
        run_git(["apply", "--whitespace=nowarn", *skipped, "-"], folder, patch, (0,), {})
    _write_untracked(folder, code)


def _write_untracked(folder: Path, code: StoredCode) -> None:
    for path, content in code.untracked():
        if os.path.realpath(folder / path) == os.path.join(os.path.realpath(folder), path):  # noqa: PTH118 (text)
            _write(folder / path, content)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _lines(content: bytes) -> list[str]:
    return content.decode(errors="replace").splitlines()


def _bounded(title: str, lines: list[str], max_lines: int) -> CodeText:
    shown = [printable(line.replace("\t", "    ")[:MAX_LINE_CHARACTERS]) for line in lines[:max_lines]]
    return CodeText(printable(title), tuple(shown), max(len(lines) - max_lines, 0))
