"""Read the code in a working tree: its commit, the diff of tracked files since then, and untracked text files.

Nothing is written and no program but git runs. What is skipped has a reason. Runs write logs, tables, texts and results
beside their code, and these would differ at every start: names decide which untracked files count as code. A program
that reads such a file has it as data: `git add` makes it count. Files with secrets are never recorded."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Annotated

from engine.base.codec import ENTRIES, Meta, Record, encode, field
from engine.base.files import read_bytes
from engine.base.redaction import SECRET_WORDS, is_secret
from engine.base.units import format_bytes
from engine.jobs.code.git import Repository

# Case does not count.
SECRET_NAMES = (
    ".env*", "*.env", "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.gpg",
    "*.asc", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass",
    ".git-credentials", ".htpasswd", ".dockercfg", ".dockerconfigjson", ".my.cnf", "credentials*", "*credentials",
    "kubeconfig*", "service-account*.json", "service_account*.json",
)  # fmt: skip
SECRET_FOLDERS = frozenset({".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".secrets"})
# `token.py` and `keys.h` are programs; `secrets.py` is one with passwords in it.
PROGRAM_ENDINGS = frozenset({
    ".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".rs",
    ".go", ".jl", ".r", ".m", ".lua", ".pl", ".rb", ".js", ".ts", ".java", ".scala", ".kt", ".swift", ".sh", ".bash",
    ".zsh", ".mk", ".cmake",
})  # fmt: skip
NAME_WORD = re.compile("[a-z]+")
# RFC 7468 and RFC 4716.
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|---- BEGIN SSH2 .*PRIVATE KEY")


def is_secret_file(path: str) -> bool:
    """Whether the name of a file, relative to its repository, says that it holds secrets."""
    parts = PurePath(path.casefold()).parts
    if not SECRET_FOLDERS.isdisjoint(parts[:-1]):
        return True
    name = PurePath(path).name
    if any(fnmatchcase(parts[-1], pattern) for pattern in SECRET_NAMES):
        return True
    if PurePath(parts[-1]).suffix in PROGRAM_ENDINGS:
        words = {word.upper() for word in NAME_WORD.findall(parts[-1])}
        return not words.isdisjoint(SECRET_WORDS | {"CREDENTIALS"})
    return is_secret(name)


def has_private_key(content: bytes) -> bool:
    """Whether a file contains a private key."""
    return _PRIVATE_KEY.search(content) is not None


# Not even recorded.
OUTPUT_ENDINGS = frozenset({".log", ".csv", ".tsv", ".jsonl", ".ndjson", ".out", ".err", ".pid", ".pyc", ".lock"})
OUTPUT_FOLDERS = frozenset({
    "__pycache__", ".ipynb_checkpoints", ".hydra", "wandb", "mlruns", "lightning_logs", "tb_logs", "work_dirs",
})  # fmt: skip
# Recorded if they are text, because a program may read them.
TEXT_ENDINGS = frozenset({".txt", ".md", ".rst", ".html", ".htm", ".tex", ".svg", ".dat"})
DATA_ENDINGS = frozenset({
    ".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".pdf", ".mp4", ".wav", ".flac", ".npy", ".npz",
    ".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".onnx", ".bin", ".pkl", ".pickle", ".h5", ".hdf5", ".parquet",
    ".arrow", ".db", ".sqlite", ".zip", ".tar", ".gz", ".zst", ".xz",
})  # fmt: skip
CODE_TEXTS = re.compile(r"(requirements|constraints).*\.txt|CMakeLists\.txt")
# results.json, eval-metrics.yaml
RESULT_WORDS = frozenset({
    "result", "results", "metric", "metrics", "history", "log", "logs", "output", "outputs", "score", "scores",
    "prediction", "predictions", "preds", "summary", "stats", "losses",
})  # fmt: skip
LIBRARY_ENDINGS = frozenset({".so", ".pyd", ".dylib", ".whl", ".egg", ".jar"})
# Existing programs import new modules, but start no new script or notebook.
IMPORTED_ENDINGS = (PROGRAM_ENDINGS | LIBRARY_ENDINGS) - {".ipynb", ".sh", ".bash", ".zsh"}


def is_output(path: str) -> bool:
    """Whether an untracked file is not recorded, because runs write such files."""
    return _ending(path) in OUTPUT_ENDINGS or not OUTPUT_FOLDERS.isdisjoint(path.split("/")[:-1])


def is_code(path: str) -> bool:
    """Whether an untracked file counts when code is compared. An unknown kind does."""
    ending = _ending(path)
    if ending in PROGRAM_ENDINGS or ending in LIBRARY_ENDINGS:
        return True
    name = path.rpartition("/")[2]
    if ending in TEXT_ENDINGS:
        return CODE_TEXTS.fullmatch(name) is not None
    return ending not in DATA_ENDINGS and RESULT_WORDS.isdisjoint(NAME_WORD.findall(name.casefold()))


def is_imported(path: str) -> bool:
    """Whether programs that are there already may find a new file: a module, a header or a nested repository."""
    return path.endswith("/") or _ending(path) in IMPORTED_ENDINGS


def _ending(path: str) -> str:
    """Return what follows the last dot of a name, with the dot, in small letters: "" for `.env`."""
    name = path.rpartition("/")[2]
    stem, dot, ending = name.rpartition(".")
    return f".{ending.casefold()}" if dot and stem else ""


MAX_FILE_BYTES = 1 << 20
MAX_UNTRACKED_FILES = 100
# Names of skipped files that are kept.
MAX_SKIPPED = 1000
MODULE_MODE = "160000"
NESTED = "is a repository of its own, whose changes are not recorded"

Entries = Annotated[dict[str, str], ENTRIES]


class CodeDigests(Record, frozen=True, kw_only=True):
    """The code in a working tree, without its content. Paths are relative to the root of the tree."""

    commit: Annotated[str, Meta(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})?\Z")] = ""
    """The commit that was checked out; "" before the first one."""
    changed: Entries = field(default_factory=dict)
    """Digests of the diffs of changed tracked files; of a file without a diff, that of its size and time."""
    untracked: Entries = field(default_factory=dict)
    """Digests of the untracked text files, also of those that do not count as code."""
    skipped: Entries = field(default_factory=dict)
    """Why files are not stored, at most 1000."""

    @property
    def is_dirty(self) -> bool:
        """Whether the code is not that of the commit."""
        return bool(self.compared)

    @property
    def compared(self) -> Mapping[str, str]:
        """The digests of all files that count as code."""
        return self.changed | {path: digest for path, digest in self.untracked.items() if is_code(path)}

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for the same code. What runs write beside it does not count."""
        return _digest(encode([self.commit, sorted(self.compared.items())]))


@dataclass(frozen=True)
class CodeState:
    """The code in a working tree: the diff of the tracked files, and the untracked text files."""

    digests: CodeDigests
    patch: bytes
    untracked: Mapping[str, bytes]


def read_code(repository: Repository, runs_dir: Path | None = None) -> CodeState:
    """Return the code in a working tree. The files in `runs_dir`, which runs write, do not count. Raises GitError."""
    output = repository.read("rev-parse", "--quiet", "--verify", "HEAD^{commit}", exit_codes=(0, 1))
    commit = os.fsdecode(output).strip()
    tree = commit or os.fsdecode(repository.read("hash-object", "-t", "tree", os.devnull)).strip()
    raw = repository.lines("diff-index", "--raw", "-z", "--no-renames", "--ignore-submodules=dirty", tree, "--")
    paths = [path for path in raw[1::2] if is_below(path)]
    names = [path for path in list_untracked(repository, runs_dir) if not is_output(path)]
    filtered = filtered_paths(repository, [*paths, *names])
    skipped: dict[str, str] = {}
    changed, patch = {}, []
    for path in paths:
        if reason := _skip_reason(repository.root / path, path, filtered):
            skipped[path], changed[path] = reason, _stat_digest(repository.root / path)
    for path, text in _read_patches(repository, tree, [path for path in paths if path not in skipped]).items():
        if has_private_key(text):
            skipped[path], changed[path] = "contains a private key", _stat_digest(repository.root / path)
        else:
            changed[path] = _digest(text)
            patch.append(text)
    untracked: dict[str, bytes] = {}
    # Code first.
    for path in sorted(names, key=lambda path: (not is_code(path), path)):
        content = _read_untracked(repository.root, path, filtered, is_full=len(untracked) >= MAX_UNTRACKED_FILES)
        if isinstance(content, bytes):
            untracked[path] = content
        elif content:
            skipped[path] = content
    digests = CodeDigests(
        commit=commit,
        changed=changed,
        untracked={path: _digest(content) for path, content in untracked.items()},
        skipped=dict(list(skipped.items())[:MAX_SKIPPED]),
    )
    return CodeState(digests, b"".join(patch), untracked)


def is_below(path: str) -> bool:
    """Whether a relative path leads to a place below its root. git takes any path from the index of a repository."""
    return not os.path.isabs(path) and ".." not in PurePath(path).parts  # noqa: PTH117 (text)


def filtered_paths(repository: Repository, paths: Sequence[str]) -> set[str]:
    """Return the paths whose content a filter of git encrypts or stores elsewhere, as git-crypt and Git LFS do.

    Raises GitError."""
    if not paths or not any(name.startswith("filter.") for name in repository.settings):
        return set()
    given = b"".join(os.fsencode(path) + b"\0" for path in paths)
    parts = repository.lines("check-attr", "-z", "--stdin", "filter", stdin=given)
    values = zip(parts[0::3], parts[2::3], strict=False)
    return {path for path, value in values if value not in ("unspecified", "unset", "set", "")}


def list_untracked(repository: Repository, runs_dir: Path | None, *, hidden: bool = False) -> list[str]:
    """Return the untracked files that are not ignored, without those in `runs_dir`. A nested repository ends with `/`.

    `hidden`: also where the settings of the repository hide them. Raises GitError."""
    shown = repository.settings.get("status.showuntrackedfiles", "").casefold()
    if not hidden and shown in ("no", "false", "off", "0"):
        # A repository of settings in the home folder: everything else there is untracked.
        return []
    names = repository.lines("ls-files", "-z", "--others", "--exclude-standard")
    runs = "" if runs_dir is None else f"{os.path.relpath(os.path.realpath(runs_dir), repository.root)}/"
    return [name for name in names if not (runs and name.startswith(runs)) and name != runs]


def _read_patches(repository: Repository, tree: str, paths: Sequence[str]) -> dict[str, bytes]:
    """Return the diff of each path. Raises GitError."""
    if not paths:
        return {}
    output = repository.read(
        *("diff-index", "--patch", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color"),
        *("--no-renames", "--ignore-submodules=dirty", "--src-prefix=a/", "--dst-prefix=b/", tree, "--"),
        *(f":(top,literal){path}" for path in paths),
    )
    # No line of content begins so: it begins with a blank or a sign. An unusual name is quoted, and stands for itself.
    headers = {f"diff --git a/{path} b/{path}".encode(errors="surrogateescape"): path for path in paths}
    patches: dict[str, bytes] = {}
    sections = (b"\n" + output).split(b"\ndiff --git ")[1:]
    for index, section in enumerate(sections):
        text = b"diff --git " + section + (b"\n" if index < len(sections) - 1 else b"")
        header = text.partition(b"\n")[0]
        path = headers.get(header, os.fsdecode(header))
        # A file that became a link is deleted and added.
        patches[path] = patches.get(path, b"") + text
    return patches


def _skip_reason(file: Path, path: str, filtered: set[str]) -> str:
    """Return why the content of a file is not recorded; "" if it is."""
    if path in filtered:
        return "has a filter of git"
    if is_secret_file(path):
        return "has the name of a file with secrets"
    try:
        status = os.lstat(file)
    except OSError:
        return ""
    is_large = stat.S_ISREG(status.st_mode) and status.st_size > MAX_FILE_BYTES
    return f"has {format_bytes(status.st_size)}" if is_large else ""


def _read_untracked(root: Path, path: str, filtered: set[str], *, is_full: bool) -> bytes | str:
    """Return the content of an untracked text file, or why it is not recorded; "" for data and results of runs."""
    file = root / path
    if path.endswith("/"):
        return NESTED
    if file.is_symlink():
        return "is a link"
    if is_full:
        return f"follows {MAX_UNTRACKED_FILES} files"
    if reason := _skip_reason(file, path, filtered):
        return reason
    try:
        content = read_bytes(file, MAX_FILE_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if b"\0" in content:
        return ""
    return "contains a private key" if has_private_key(content) else content


def _stat_digest(file: Path) -> str:
    """Return a digest of kind, size and modification time of a file."""
    try:
        status = os.lstat(file)
    except OSError:
        return "missing"
    return _digest(f"{status.st_mode} {status.st_size} {status.st_mtime_ns}".encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
