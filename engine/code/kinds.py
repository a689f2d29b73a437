"""Which untracked files count as code, by their names.

Runs write logs, tables, texts and results beside their code, and these would differ at every start. A program that
reads such a file has it as data: `git add` makes it count.
"""

from __future__ import annotations

import re

from engine.code.secret_files import NAME_WORD, PROGRAM_ENDINGS

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
