"""Read the code in a working tree: its commit, the changes of tracked files since then, and untracked text files.

Nothing is written and no program but git runs. Sizes, numbers and time are bounded; what is skipped has a reason.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from engine.code.digests import CodeDigests, digest_of
from engine.code.git import MAX_OUTPUT_BYTES, GitError, Repository, find_repository
from engine.code.kinds import is_code, is_library, is_output, is_program
from engine.code.patches import MAX_PATCH_BYTES, read_diff
from engine.code.secret_files import has_private_key, is_secret_file
from engine.utils.files import open_regular_file, read_bytes
from engine.utils.text import printable
from engine.utils.units import format_bytes

MAX_FILE_BYTES = 1 << 20
MAX_UNTRACKED_FILES = 100
MAX_UNTRACKED_BYTES = 1 << 24
# The digest of a larger changed file is that of its size and modification time.
MAX_HASHED_BYTES = 1 << 26
# Of names of untracked files; a folder of data that is not ignored can have millions.
MAX_NAMES_BYTES = 1 << 22
# Names of skipped files that are kept.
MAX_SKIPPED = 1000
# An argument of git for each changed file that is not part of the patch.
MAX_EXCLUDED_FILES = 5000
TEXT_BYTES = 1 << 13
# Repositories within the repository, and how deep they are nested.
MAX_MODULES, MAX_DEPTH = 100, 4
MAX_MODULE_THREADS = 4
SECRET_NAME, PRIVATE_KEY = "has the name of a file with secrets", "contains a private key"
FILTERED, NO_TEXT = "has a filter of git", "is no text"
HIDDEN = "is hidden from git (skip-worktree or assume-unchanged)"
MISSING = "missing"
MODULE_MODE = "160000"
# Entries of `git ls-files -v --stage`: submodules, and files with the bit assume-unchanged or skip-worktree, whose
# changes git ignores (git-update-index(1)).
_SPECIAL_ENTRY = re.compile(rb"(?:\A|\0)([A-Z] 160000 [^\0]*|[a-zS] [^\0]*)")


@dataclass(frozen=True)
class CodeState:
    """The code in the working tree `root`.

    `patches` maps each changed tracked file to its diff, and `untracked` each untracked text file to its content."""

    root: Path
    digests: CodeDigests
    patches: Mapping[str, bytes] = field(default_factory=dict)
    untracked: Mapping[str, bytes] = field(default_factory=dict)


def read_folder_code(folder: Path, runs_dir: Path | None = None) -> CodeState | None:
    """Return the code in the repository around a folder; None outside of git. Raises GitError."""
    repository = find_repository(folder)
    return None if repository is None else read_code(repository, runs_dir)


def read_code(repository: Repository, runs_dir: Path | None = None, depth: int = 0) -> CodeState:
    """Return the code in a working tree. The files in `runs_dir`, which runs write, do not count.

    `depth` is the number of repositories around it. Raises GitError."""
    commit, notes = _read_commit(repository), _Notes()
    tree = _compared_tree(repository, commit)
    paths = _changed_paths(repository, tree)
    names = [path for path in list_untracked(repository, runs_dir, notes) if not is_output(path)]
    # Content that a filter encrypts or stores elsewhere, such as that of git-crypt and Git LFS.
    filtered = filtered_paths(repository, [*paths, *names])
    patches, changed = _read_patches(repository, tree, paths, filtered, notes)
    files = [path for path in names if not path.endswith("/")]
    untracked, added = _read_untracked(repository.root, files, filtered, notes)
    submodules, hidden = _special_entries(repository)
    for path in filter(lambda path: os.path.lexists(repository.root / path), hidden[:MAX_SKIPPED]):
        changed[path] = _content_digest(repository.root / path, is_secret=is_secret_file(path))
        notes.add(path, HIDDEN)
    for path in hidden[MAX_SKIPPED:]:
        notes.add_unread(repository.root, path, HIDDEN)
    nested = [path for path in names if path.endswith("/")]
    modules = _read_modules(repository, [*submodules, *nested], runs_dir, depth, notes)
    digests = CodeDigests(
        commit=commit,
        changed=changed,
        untracked=added,
        unread=notes.unread,
        rest=notes.rest,
        modules=modules,
        unknown=notes.unknown,
        skipped=notes.skipped,
    )
    return CodeState(repository.root, digests, patches, untracked)


class _Notes:
    """What is not recorded, of a bounded number of files: why, and digests by which a change is noticed."""

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self.unknown = ""
        self._rest = hashlib.sha256()
        self._num_rest = 0

    @property
    def rest(self) -> str:
        return self._rest.hexdigest() if self._num_rest else ""

    def add(self, path: str, reason: str) -> None:
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped[path] = reason

    def add_unread(self, root: Path, path: str, reason: str) -> None:
        """Note a file that exists by its size and modification time."""
        if (digest := _stat_digest(root / path)) == MISSING:
            return
        self.add(path, reason)
        if len(self.unread) < MAX_SKIPPED:
            self.unread[path] = digest
        else:
            self._num_rest += 1
            self._rest.update(os.fsencode(path) + b"\0" + digest.encode() + b"\0")

    def add_unknown(self, reason: str) -> None:
        self.unknown = self.unknown or reason


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
    repository: Repository, tree: str, paths: Sequence[str], filtered: set[str], notes: _Notes
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
    patches, is_complete = read_diff(repository, tree, paths, reasons)
    if not is_complete:
        limit = f"follows {format_bytes(MAX_PATCH_BYTES)} of changes"
        reasons |= {path: limit for path in paths if path not in patches and path not in reasons}
    for path, patch in [*patches.items()]:
        if has_private_key(patch):
            reasons[path] = PRIVATE_KEY
            del patches[path]
    changed = {path: digest_of(patch) for path, patch in patches.items()}
    for path, reason in reasons.items():
        changed[path] = _content_digest(repository.root / path, is_secret=reason in (SECRET_NAME, PRIVATE_KEY))
        notes.add(path, reason)
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


def list_untracked(
    repository: Repository, runs_dir: Path | None, notes: _Notes | None = None, *, for_copy: bool = False
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
    if not is_complete and notes is not None:
        notes.add(".", reason := f"has more untracked files than the first {len(names)}")
        notes.add_unknown(reason)
    return names


def _relative(root: Path, folder: Path | None) -> str | None:
    """Return the path of a folder below a root, None if it is not below."""
    if folder is None:
        return None
    real = Path(os.path.realpath(folder))
    return str(real.relative_to(root)) if real != root and real.is_relative_to(root) else None


def _escaped_pattern(path: str) -> str:
    return "".join(f"\\{character}" if character in "*?[\\ " else character for character in path)


def _read_untracked(
    root: Path, names: Sequence[str], filtered: set[str], notes: _Notes
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return content and digest of untracked text files: programs first, then other code."""
    contents: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    total = 0
    for path in sorted(names, key=lambda path: (not is_program(path), not is_code(path), path)):
        file, is_full = root / path, len(digests) >= MAX_UNTRACKED_FILES or total >= MAX_UNTRACKED_BYTES
        if is_full:
            reason = f"follows {MAX_UNTRACKED_FILES} files or {format_bytes(MAX_UNTRACKED_BYTES)}"
        elif path in filtered:
            reason = FILTERED
        elif is_secret_file(path):
            reason = SECRET_NAME
        elif file.is_symlink():
            with suppress(OSError):
                digests[path] = digest_of(b"link to " + os.fsencode(file.readlink()))
            continue
        else:
            content = _read_text(file)
            if isinstance(content, bytes):
                contents[path], digests[path] = content, digest_of(content)
                total += len(content)
                continue
            reason = content
        if reason == NO_TEXT and not is_library(path) and not os.access(file, os.X_OK):
            # Data and results of runs; a program is text.
            continue
        if is_code(path):
            notes.add_unread(root, path, reason)
        else:
            notes.add(path, reason)
    return contents, digests


def _read_text(file: Path) -> bytes | str:
    """Return the content of a text file, or why it is not recorded."""
    try:
        with open_regular_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            start = opened.read(TEXT_BYTES)
            if b"\0" in start:
                return NO_TEXT
            if size > MAX_FILE_BYTES:
                return f"has {format_bytes(size)}"
            content = start + opened.read(MAX_FILE_BYTES - len(start))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return PRIVATE_KEY if has_private_key(content) else content


def _special_entries(repository: Repository) -> tuple[list[str], list[str]]:
    """Return the submodules, and the files whose changes git ignores (assume-unchanged, skip-worktree).

    Raises GitError.
    """
    output, is_complete = repository.read("ls-files", "-z", "-v", "--stage")
    if not is_complete:
        raise GitError(f"has names of files of more than {MAX_OUTPUT_BYTES} bytes", code="too-large")
    submodules, hidden = list[str](), list[str]()
    for match in _SPECIAL_ENTRY.finditer(output):
        facts, _, name = match[1].partition(b"\t")
        path = os.fsdecode(name)
        if is_below(path):
            (submodules if facts.split()[1] == MODULE_MODE.encode() else hidden).append(path)
    return submodules, hidden


@dataclass(frozen=True)
class _Module:
    """A repository within a repository: the fingerprint of its code, "" without files, and what cannot be compared."""

    fingerprint: str = "unknown"
    unknown: str = ""
    is_dirty: bool = False


def _read_modules(
    repository: Repository, paths: Sequence[str], runs_dir: Path | None, depth: int, notes: _Notes
) -> dict[str, str]:
    """Return the fingerprints of the repositories within a repository."""
    if not paths:
        return {}
    # The import takes 10 ms, and few repositories need it.
    from concurrent.futures import ThreadPoolExecutor

    def read(path: str) -> _Module:
        return _read_module(Repository(repository.root / path, repository.deadline), runs_dir, depth)

    modules: dict[str, str] = {}
    # Each takes five git commands or more. Nested pools would multiply the commands that run at once.
    with ThreadPoolExecutor(1 if depth else MAX_MODULE_THREADS) as pool:
        for path, module in zip(paths, pool.map(read, paths[:MAX_MODULES]), strict=False):
            if module.fingerprint:
                modules[path] = module.fingerprint
            if module.is_dirty or (path.endswith("/") and not module.unknown):
                notes.add(path, "is a repository of its own, whose changes are not recorded")
            if module.unknown:
                notes.add(path, module.unknown)
                notes.add_unknown(f"contains {printable(path)}, which {module.unknown}")
    if len(paths) > MAX_MODULES:
        notes.add_unknown(f"contains more than {MAX_MODULES} repositories")
    return modules


def _read_module(repository: Repository, runs_dir: Path | None, depth: int) -> _Module:
    """Return a repository that has `depth` repositories around the one that contains it."""
    root = repository.root
    try:
        if not stat.S_ISDIR(os.lstat(root).st_mode) or os.path.realpath(root) != str(root):
            # A file or a link in its place.
            return _Module(_stat_digest(root))
        if not os.path.lexists(root / ".git"):
            if any(root.iterdir()):
                raise GitError("is a submodule with files, but without a repository")
            return _Module("")
        if depth >= MAX_DEPTH:
            raise GitError("is nested too deep")
        digests = read_code(repository, runs_dir, depth + 1).digests
        return _Module(digests.fingerprint, digests.unknown, digests.is_dirty)
    except FileNotFoundError:
        return _Module(MISSING)
    except OSError as error:
        return _Module(unknown=f"cannot be read: {error.strerror}")
    except GitError as error:
        return _Module(unknown=str(error))


def _content_digest(file: Path, *, is_secret: bool) -> str:
    """Return a digest of a changed file without a diff, of its size and time if it is large or secret."""
    try:
        if not is_secret:
            return digest_of(read_bytes(file, MAX_HASHED_BYTES))
    except OSError:
        pass
    return _stat_digest(file)


def _stat_digest(file: Path) -> str:
    """Return a digest of kind, size and modification time of a file."""
    try:
        status = os.lstat(file)
    except OSError:
        return MISSING
    return digest_of(f"{status.st_mode} {status.st_size} {status.st_mtime_ns}".encode())
