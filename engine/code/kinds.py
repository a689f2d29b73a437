"""Which untracked files count as code, and which files hold keys or passwords, by their names and first bytes.

Runs write logs, tables, texts and results beside their code, and these would differ at every start. A program that
reads such a file has it as data: `git add` makes it count. Files with secrets are never recorded."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import PurePath

from engine.utils.redaction import SECRET_WORDS, is_secret

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
