"""The difference of code between two runs: their commits, and the diff of what each had changed since its commit.

`gputrain compare` and `gputrain report --code` show it. Code is text of others: it is escaped and bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff

from engine.code.record import PATCH_FILE, UNTRACKED_FOLDER, CodeRecord, read_code_record
from engine.code.state import MAX_FILE_BYTES, MAX_PATCH_BYTES, split_patch
from engine.runs.folder import RunFolder
from engine.utils.files import read_bytes
from engine.utils.redaction import redact_text
from engine.utils.text import pluralize, printable

# difflib takes a second for 5,000 lines that differ everywhere.
MAX_FILE_LINES = 2000
MAX_LINE_CHARACTERS = 300
MAX_LINES = 400


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

    @property
    def digests(self) -> Mapping[str, str]:
        """The digests of all changed and untracked files."""
        return {**self.record.untracked, **self.record.changed}

    def lines_of(self, path: str) -> list[str] | None:
        """Return the diff of a file, or its lines if it is untracked; an empty list if the run has not changed it, and
        None if it is not stored as text."""
        if path not in self.digests:
            return []
        content = self._content(path)
        if content is None or b"\nGIT binary patch\n" in content:
            return None
        # The IDs of the content follow from the content.
        lines = content.decode(errors="replace").splitlines()
        return [line for line in lines if not line.startswith(("diff --git ", "index "))]

    def _content(self, path: str) -> bytes | None:
        try:
            if path not in self.record.changed:
                return read_bytes(self.folder.code / UNTRACKED_FOLDER / path, MAX_FILE_BYTES)
            if self._patches is None:
                stored = read_bytes(self.folder.code / PATCH_FILE, MAX_PATCH_BYTES)
                self._patches = split_patch(stored, list(self.record.changed))
        except OSError:
            return None
        return self._patches.get(path)


def read_stored_code(folder: RunFolder) -> StoredCode | None:
    """Return the code that a run has recorded; None if it has none."""
    record = read_code_record(folder)
    return None if record is None else StoredCode(folder, record)


def compare_code(first: StoredCode, second: StoredCode, max_lines: int = MAX_LINES) -> CodeText | None:
    """Return how the code of the second run differs from that of the first; None if it does not."""
    if first.record.fingerprint == second.record.fingerprint:
        return None
    before, after = first.digests, second.digests
    paths = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    title = f"Code of {second.name} against {first.name}"
    lines = [_commit_line(first.record, second.record)] if first.record.commit != second.record.commit else []
    for path in paths:
        lines += _file_lines(first, second, path)
    return _bounded(title, lines, max_lines)


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
    lines = [f"commit {code.record.commit or 'none'} in {code.record.root}"]
    for path in code.digests:
        content = code.lines_of(path)
        lines += [f"{path}: {_unshown(code, path)}"] if content is None else [path, *content]
    return _bounded(f"Code of {code.name}", lines, max_lines)


def _commit_line(first: CodeRecord, second: CodeRecord) -> str:
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
    return f"not stored: {code.record.skipped.get(path, 'no text')}"


def _bounded(title: str, lines: list[str], max_lines: int) -> CodeText:
    shown = [printable(line.replace("\t", "    ")[:MAX_LINE_CHARACTERS]) for line in lines[:max_lines]]
    return CodeText(printable(title), tuple(shown), max(len(lines) - max_lines, 0))
