"""Read the code in a working tree: its commit, the changes of tracked files since then, and untracked text files.

Nothing is written and no program but git runs. Sizes, numbers and time are bounded; what is skipped has a reason.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from engine.code.git import GitError, Repository
from engine.code.secret_files import PROGRAM_ENDINGS, has_private_key, is_secret_file
from engine.utils.codec import encode
from engine.utils.files import open_regular_file, read_bytes
from engine.utils.units import format_bytes

MAX_FILE_BYTES = 1 << 20
MAX_UNTRACKED_FILES = 100
MAX_UNTRACKED_BYTES = 1 << 24
MAX_PATCH_BYTES = 1 << 24
# The digest of a larger changed file is that of its size and modification time.
MAX_HASHED_BYTES = 1 << 26
# Of names of untracked files; a folder of data that is not ignored can have millions.
MAX_NAMES_BYTES = 1 << 22
# Names of skipped files that are kept.
MAX_SKIPPED = 1000
# An argument of git for each changed file that is not part of the patch.
MAX_EXCLUDED_FILES = 5000
TEXT_BYTES = 1 << 13
# What runs write beside their code. It would differ at every start.
OUTPUT_ENDINGS = frozenset({".log", ".csv", ".tsv", ".jsonl", ".ndjson", ".out", ".err", ".pid", ".pyc", ".lock"})
OUTPUT_FOLDERS = frozenset({"__pycache__", ".ipynb_checkpoints", "wandb", "mlruns", "lightning_logs", "tb_logs"})
SECRET_NAME, PRIVATE_KEY = "has the name of a file with secrets", "contains a private key"
FILTERED = "has a filter of git"
_NO_TRANSFORMATION = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=dirty")
_ESCAPES = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}


@dataclass(frozen=True)
class CodeState:
    """The code in a working tree. Paths are relative to its root.

    `commit` is empty before the first one. `patches` maps each changed tracked file to its diff, and `untracked` each
    untracked text file to its content. `changed` and `added` map these files, and changed ones without a diff, to
    digests. `skipped` maps what is not recorded to the reason."""

    root: Path
    commit: str
    patches: Mapping[str, bytes] = field(default_factory=dict)
    untracked: Mapping[str, bytes] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_dirty(self) -> bool:
        """Whether the code is not that of the commit."""
        return bool(self.changed or self.added)

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for the same commit, changes and untracked text files."""
        return _digest(encode([self.commit, sorted(self.changed.items()), sorted(self.added.items())]))


def read_code(repository: Repository, runs_dir: Path | None = None) -> CodeState:
    """Return the code in a working tree. The files in `runs_dir`, which runs write, do not count. Raises GitError."""
    commit, skipped = _read_commit(repository), _Skipped()
    tree = _compared_tree(repository, commit)
    paths = _changed_paths(repository, tree)
    names = [path for path in list_untracked(repository, runs_dir, skipped) if not _is_output(path)]
    # Content that a filter encrypts or stores elsewhere, such as that of git-crypt and Git LFS.
    filtered = filtered_paths(repository, [*paths, *names])
    patches, changed = _read_patches(repository, tree, paths, filtered, skipped)
    untracked, added = _read_untracked(repository.root, [each for each in names if each not in filtered], skipped)
    for path in filtered.intersection(names):
        skipped.add(path, FILTERED)
    return CodeState(repository.root, commit, patches, untracked, changed, added, skipped.reasons)


class _Skipped:
    """Why files are not recorded, of a bounded number of files."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def add(self, path: str, reason: str) -> None:
        if len(self.reasons) < MAX_SKIPPED:
            self.reasons[path] = reason


def _read_commit(repository: Repository) -> str:
    """Return the ID of the commit that is checked out, "" if there is none yet. Raises GitError."""
    output, _ = repository.read("rev-parse", "--quiet", "--verify", "HEAD^{commit}", exit_codes=(0, 1))
    return os.fsdecode(output).strip()


def _compared_tree(repository: Repository, commit: str) -> str:
    """Return what the files are compared with: the commit, or the tree without files. Raises GitError."""
    if commit:
        return commit
    output, _ = repository.read("hash-object", "-t", "tree", os.devnull)
    return os.fsdecode(output).strip()


def _changed_paths(repository: Repository, tree: str) -> list[str]:
    """Return the tracked files that may differ from a tree: git reads none of them here. Raises GitError."""
    parts = repository.lines("diff-index", "--raw", "-z", "--no-renames", "--ignore-submodules=dirty", tree, "--")
    return [path for path in parts[1::2] if is_below(path)]


def is_below(path: str) -> bool:
    """Whether a relative path leads to a place below its root. git takes any path from the index of a repository."""
    return not os.path.isabs(path) and ".." not in PurePath(path).parts  # noqa: PTH117 (text)


def filtered_paths(repository: Repository, paths: Sequence[str]) -> set[str]:
    """Return the paths whose content goes through a filter of git. Raises GitError."""
    if not paths:
        return set()
    given = b"".join(os.fsencode(path) + b"\0" for path in paths)
    parts = repository.lines("check-attr", "-z", "--stdin", "filter", stdin=given)
    values = zip(parts[0::3], parts[2::3], strict=False)
    return {path for path, value in values if value not in ("unspecified", "unset", "set", "")}


def _read_patches(
    repository: Repository, tree: str, paths: Sequence[str], filtered: set[str], skipped: _Skipped
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return diff and digest of each changed file. Raises GitError."""
    if not paths:
        return {}, {}
    reasons: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        reason = FILTERED if path in filtered else _unshown_reason(repository.root, path)
        if reason:
            reasons[path] = reason
    if len(reasons) > MAX_EXCLUDED_FILES:
        raise GitError(f"is not read: {len(reasons)} changed files are too large or secret", code="too-many")
    patches, is_complete = _diff(repository, tree, paths, reasons)
    if not is_complete:
        limit = f"follows {format_bytes(MAX_PATCH_BYTES)} of changes"
        reasons |= {path: limit for path in paths if path not in patches and path not in reasons}
    for path, patch in [*patches.items()]:
        if has_private_key(patch):
            reasons[path] = PRIVATE_KEY
            del patches[path]
    changed = {path: _digest(patch) for path, patch in patches.items()}
    for path, reason in reasons.items():
        changed[path] = _content_digest(repository.root / path, is_secret=reason in (SECRET_NAME, PRIVATE_KEY))
        skipped.add(path, reason)
    return patches, changed


def _unshown_reason(root: Path, path: str) -> str:
    """Return why the diff of a changed file is not recorded; "" if it is."""
    if is_secret_file(path):
        return SECRET_NAME
    try:
        status = os.lstat(root / path)
    except OSError:
        return ""
    is_large = stat.S_ISREG(status.st_mode) and status.st_size > MAX_FILE_BYTES
    return f"has {format_bytes(status.st_size)}" if is_large else ""


def _diff(
    repository: Repository, tree: str, paths: Sequence[str], excluded: Iterable[str]
) -> tuple[dict[str, bytes], bool]:
    """Return the diff of each path, and whether there is no more. Raises GitError."""
    pathspecs = [".", *(f":(top,literal,exclude){path}" for path in excluded)]
    output, is_complete = repository.read(
        *("diff-index", "--patch", "--binary", "--full-index", "--unified=3", *_NO_TRANSFORMATION),
        *("--src-prefix=a/", "--dst-prefix=b/", tree, "--", *pathspecs),
        max_bytes=MAX_PATCH_BYTES,
    )
    return split_patch(output, paths, is_complete=is_complete), is_complete


def split_patch(output: bytes, paths: Iterable[str], *, is_complete: bool = True) -> dict[str, bytes]:
    """Return the diff of each path in the output of git. The last one is cut off unless the output is complete."""
    headers = {_header(os.fsencode(path)): path for path in paths}
    patches: dict[str, bytes] = {}
    # No line of content begins so: it begins with a blank, a sign, or the length of base 85.
    sections = output.split(b"\ndiff --git ")
    for index, section in enumerate(sections):
        text = (b"diff --git " if index else b"") + section + (b"\n" if index < len(sections) - 1 else b"")
        header, _, body = text.partition(b"\n")
        is_cut = not is_complete and index == len(sections) - 1
        # Only the time of the file has changed if nothing follows.
        if body and not is_cut and (path := headers.get(header)) is not None:
            # A file that became a link is deleted and added.
            patches[path] = patches.get(path, b"") + text
    return patches


def _header(path: bytes) -> bytes:
    """Return the first line of the diff of a file, which git quotes as C does."""

    def quoted(name: bytes) -> bytes:
        if not any(byte < 32 or byte in (34, 92, 127) for byte in name):
            return name
        escaped = (
            f"\\{_ESCAPES[byte]}".encode() if byte in _ESCAPES
            else f"\\{byte:03o}".encode() if byte < 32 or byte == 127
            else bytes([byte])
            for byte in name
        )  # fmt: skip
        return b'"' + b"".join(escaped) + b'"'

    return b"diff --git " + quoted(b"a/" + path) + b" " + quoted(b"b/" + path)


def list_untracked(
    repository: Repository, runs_dir: Path | None, skipped: _Skipped | None = None, *, for_copy: bool = False
) -> list[str]:
    """Return the untracked files that are not ignored, without those in `runs_dir`. A nested repository ends with `/`.

    Raises GitError. `for_copy`: all of them are needed, also where the settings of the repository hide them."""
    shown = repository.settings.get("status.showuntrackedfiles", "").casefold()
    if not for_copy and shown in ("no", "false", "off", "0"):
        # A repository of settings in the home folder: everything else there is untracked.
        return []
    arguments, relative = ["ls-files", "-z", "--others", "--exclude-standard"], _relative(repository.root, runs_dir)
    if relative is not None:
        arguments += ["--exclude", f"/{_escaped_pattern(relative)}/"]
    output, is_complete = repository.read(*arguments, max_bytes=MAX_NAMES_BYTES)
    names = [os.fsdecode(name) for name in output.split(b"\0")[:-1]]
    if not is_complete and for_copy:
        raise GitError(f"has more untracked files than the first {len(names)}", code="too-large")
    if not is_complete and skipped is not None:
        skipped.add(".", f"has more untracked files than the first {len(names)}")
    return names


def _relative(root: Path, folder: Path | None) -> str | None:
    """Return the path of a folder below a root, None if it is not below."""
    if folder is None:
        return None
    real = Path(os.path.realpath(folder))
    return str(real.relative_to(root)) if real != root and real.is_relative_to(root) else None


def _escaped_pattern(path: str) -> str:
    return "".join(f"\\{character}" if character in "*?[\\ " else character for character in path)


def _is_output(path: str) -> bool:
    parts = PurePath(path).parts
    return PurePath(path).suffix in OUTPUT_ENDINGS or not OUTPUT_FOLDERS.isdisjoint(parts[:-1])


def _read_untracked(root: Path, names: Sequence[str], skipped: _Skipped) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return content and digest of untracked text files, programs first."""
    contents: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    total = 0
    for path in sorted(names, key=lambda path: (PurePath(path).suffix not in PROGRAM_ENDINGS, path)):
        if path.endswith("/"):
            skipped.add(path, "is a repository of its own")
            continue
        if is_secret_file(path):
            skipped.add(path, SECRET_NAME)
            continue
        if len(digests) >= MAX_UNTRACKED_FILES or total >= MAX_UNTRACKED_BYTES:
            skipped.add(path, f"follows {MAX_UNTRACKED_FILES} files or {format_bytes(MAX_UNTRACKED_BYTES)}")
            continue
        file = root / path
        try:
            if file.is_symlink():
                digests[path] = _digest(b"link to " + os.fsencode(file.readlink()))
                continue
            with open_regular_file(file) as opened:
                size = os.fstat(opened.fileno()).st_size
                start = opened.read(TEXT_BYTES)
                if b"\0" in start:
                    # Data and results of runs; a program is text.
                    continue
                if size > MAX_FILE_BYTES:
                    skipped.add(path, f"has {format_bytes(size)}")
                    continue
                content = start + opened.read(MAX_FILE_BYTES - len(start))
        except OSError as error:
            skipped.add(path, f"cannot be read: {error.strerror}")
            continue
        if has_private_key(content):
            skipped.add(path, PRIVATE_KEY)
            continue
        contents[path], digests[path] = content, _digest(content)
        total += len(content)
    return contents, digests


def _content_digest(file: Path, *, is_secret: bool) -> str:
    """Return a digest of a changed file without a diff, of its size and time if it is large or secret."""
    try:
        if not is_secret:
            return _digest(read_bytes(file, MAX_HASHED_BYTES))
    except OSError:
        pass
    try:
        status = os.lstat(file)
    except OSError:
        return "missing"
    return _digest(f"{status.st_mode} {status.st_size} {status.st_mtime_ns}".encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
