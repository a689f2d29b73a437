"""The difference of code between two runs: git compares what each has recorded since its commit.

`gputrain compare` shows it. Code is text of others: it is escaped and bounded, and no repository is read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.base.files import read_bytes
from engine.base.text import printable
from engine.jobs.code.git import GitError, run_git
from engine.jobs.code.record import PATCH_FILE, UNTRACKED_FOLDER, CodeRecord, read_code_record
from engine.jobs.code.state import MAX_FILE_BYTES, MAX_UNTRACKED_FILES, is_below, is_code
from engine.runs.folder import RunFolder

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
        if before.commit and after.commit:
            lines.append(f"`git diff {before.commit} {after.commit}` shows what was committed")
    unstored = before.skipped.keys() | after.skipped.keys()
    differing = (path for path in sorted(unstored) if before.changed.get(path) != after.changed.get(path))
    lines += [f"{path}: differs, and is not stored" for path in differing]
    with tempfile.TemporaryDirectory(prefix="gputrain-code-") as name:
        place = Path(name)
        for side, code in (("a", first), ("b", second)):
            for path, content in ((PATCH_FILE, code.patch), *code.untracked()):
                (place / side / path).parent.mkdir(parents=True, exist_ok=True)
                (place / side / path).write_bytes(content)
        try:
            # Exit code 1: they differ.
            output = run_git(["diff", "--no-index", "--no-prefix", *NO_PROGRAMS, "a", "b"], place, b"", (0, 1), {})
        except GitError as error:
            return [*lines, str(error)]
    return lines + output.decode(errors="replace").splitlines()
