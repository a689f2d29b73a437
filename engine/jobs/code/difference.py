"""The difference of code between two runs: git compares what each has recorded since its commit.

`gputrain compare` shows it. Code is text of others: it is escaped and bounded, and no repository is read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.base.files import read_bytes
from engine.base.text import printable
from engine.jobs.code.git import GitError, run_git
from engine.jobs.code.record import PATCH_FILE, UNTRACKED_FOLDER, read_code_record
from engine.jobs.code.state import MAX_FILE_BYTES, MAX_UNTRACKED_FILES, CodeDigests, is_below, is_code
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


def code_differences(runs: Sequence[object], reference: int) -> Iterator[CodeText]:
    """Yield how the code of each run differs from that of the run with the index `reference`.

    Runs of other programs have no recorded code."""
    folders = [run for run in runs if isinstance(run, RunFolder)]
    codes = {run: record.digests for run in folders if (record := read_code_record(run)) is not None}
    first = runs[reference]
    if not isinstance(first, RunFolder) or first not in codes:
        return
    for run, code in codes.items():
        if code.fingerprint != codes[first].fingerprint:
            lines = [line.replace("\t", "    ")[:MAX_LINE_CHARACTERS] for line in _compare(codes, first, run)]
            title = printable(f"Code of {run.name} against {first.name}")
            yield CodeText(title, tuple(map(printable, lines[:MAX_LINES])), max(len(lines) - MAX_LINES, 0))


def _compare(codes: Mapping[RunFolder, CodeDigests], first: RunFolder, second: RunFolder) -> list[str]:
    before, after, lines = codes[first], codes[second], []
    if before.commit != after.commit:
        lines.append(f"commit {after.commit or 'none'} in place of {before.commit or 'none'}")
        if before.commit and after.commit:
            lines.append(f"`git diff {before.commit} {after.commit}` shows what was committed")
    unstored = before.skipped.keys() | after.skipped.keys()
    differing = (path for path in sorted(unstored) if before.changed.get(path) != after.changed.get(path))
    lines += [f"{path}: differs, and is not stored" for path in differing]
    with tempfile.TemporaryDirectory(prefix="gputrain-code-") as name:
        place = Path(name)
        for side, run in (("a", first), ("b", second)):
            _write_code(run, codes[run], place / side)
        try:
            # Exit code 1: they differ.
            output = run_git(["diff", "--no-index", "--no-prefix", *NO_PROGRAMS, "a", "b"], place, b"", (0, 1), {})
        except GitError as error:
            return [*lines, str(error)]
    return lines + output.decode(errors="replace").splitlines()


def _write_code(run: RunFolder, digests: CodeDigests, target: Path) -> None:
    """Write the diff of the tracked files and the untracked files of code that can be read. No link is followed."""
    home = Path(os.path.realpath(run.code))
    names = [path for path in digests.untracked if is_code(path) and is_below(path)][:MAX_UNTRACKED_FILES]
    files = {home / PATCH_FILE: (PATCH_FILE, MAX_PATCH_BYTES)}
    files |= {home / UNTRACKED_FOLDER / path: (path, MAX_FILE_BYTES) for path in names}
    target.mkdir()
    for file, (path, max_bytes) in files.items():
        if os.path.realpath(file) == str(file):
            with suppress(OSError):
                content = read_bytes(file, max_bytes)
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (target / path).write_bytes(content)
