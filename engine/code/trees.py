"""The difference between two recorded states of a repository, as git shows that of two commits.

Each state is a commit with a recorded diff and untracked files. git makes a tree of it in an index and objects of a
temporary folder, so neither the repository nor its working tree changes. A diff may be that of somebody else's run:
git checks its paths, and writes none of its files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.code.git import Repository
from engine.code.patches import NO_TRANSFORMATION, patch_header, quote_path

# Output of git that is read. At most a few hundred lines of the difference are shown.
MAX_DIFF_BYTES = 1 << 22
MAX_NAMES_BYTES = 1 << 22


@dataclass(frozen=True)
class RecordedState:
    """A commit, "" for none, the diffs of files that had changed since, and the content of untracked files."""

    commit: str
    patches: Sequence[bytes] = ()
    untracked: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class ChangedFile:
    """A file that differs, with the numbers of added and deleted lines; None if it is no text."""

    path: str
    added: int | None
    deleted: int | None


@dataclass(frozen=True)
class TreeDifference:
    """The files that differ, and the beginning of the unified diff."""

    files: tuple[ChangedFile, ...]
    diff: bytes


def compare_states(repository: Repository, first: RecordedState, second: RecordedState) -> TreeDifference:
    """Return how the second state of a repository differs from the first. Raises GitError if a commit is not there or a
    diff does not apply to it, and OSError."""
    with _scratch(repository) as scratch:
        trees = [_write_tree(scratch, state) for state in (first, second)]
        options = ("diff-tree", "-r", *NO_TRANSFORMATION, "--submodule=short")
        parts = scratch.lines(*options, "--numstat", "-z", *trees, "--", max_bytes=MAX_NAMES_BYTES)
        diff, _ = scratch.read(*options, "--patch", "--unified=3", *trees, "--", max_bytes=MAX_DIFF_BYTES)
    return TreeDifference(tuple(map(_changed_file, parts)), diff)


def has_commit(repository: Repository, commit: str) -> bool:
    """Whether a commit is there. Raises GitError."""
    if not commit:
        return True
    output, _ = repository.read("rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}", exit_codes=(0, 1))
    return output.strip() == commit.encode()


@contextmanager
def _scratch(repository: Repository) -> Iterator[Repository]:
    """A repository whose index and new objects are in a temporary folder. Raises GitError."""
    output, _ = repository.read("rev-parse", "--git-path", "objects")
    objects = os.path.join(repository.root, os.fsdecode(output.removesuffix(b"\n")))  # noqa: PTH118 (text)
    # Paths are separated by colons, and a quoted one may contain some (git(1)).
    quoted = objects.replace("\\", "\\\\").replace('"', '\\"')
    with tempfile.TemporaryDirectory(prefix="gputrain-code-") as folder:
        own = Path(folder) / "objects"
        own.mkdir()
        yield replace(
            repository,
            variables={
                "GIT_INDEX_FILE": f"{folder}/index",
                "GIT_OBJECT_DIRECTORY": str(own),
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{quoted}"',
            },
        )


def _write_tree(scratch: Repository, state: RecordedState) -> str:
    """Return the ID of the tree of a state. Raises GitError."""
    scratch.read("read-tree", state.commit or "--empty")
    patch = b"".join([*state.patches, *(_new_file(path, content) for path, content in state.untracked.items())])
    if patch:
        # Nothing but the index changes. git refuses paths such as `..` and `.git`.
        scratch.read("apply", "--cached", "--whitespace=nowarn", "-", stdin=patch)
    output, _ = scratch.read("write-tree", "--missing-ok")
    return os.fsdecode(output).strip()


def _new_file(path: str, content: bytes) -> bytes:
    """Return the diff that adds a text file."""
    header = patch_header(os.fsencode(path)) + b"\nnew file mode 100644\n"
    if not content:
        return header
    lines = content.split(b"\n")
    is_terminated = not lines[-1]
    lines = lines[:-1] if is_terminated else lines
    target = quote_path(b"b/" + os.fsencode(path))
    body = b"".join(b"+" + line + b"\n" for line in lines)
    end = b"" if is_terminated else b"\\ No newline at end of file\n"
    return header + b"--- /dev/null\n+++ " + target + f"\n@@ -0,0 +1,{len(lines)} @@\n".encode() + body + end


def _changed_file(line: str) -> ChangedFile:
    added, deleted, path = line.split("\t", 2)
    # git prints a dash for binary files.
    return ChangedFile(path, *(int(number) if number.isdigit() else None for number in (added, deleted)))
