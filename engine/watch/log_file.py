"""Find the text log of a foreign run, which a trainer writes beside its metrics."""

from __future__ import annotations

from pathlib import Path

from engine.base.files import find_file_stamp
from engine.watch import text_log
from engine.watch.folders import ForeignRun
from engine.watch.reading import list_folder

# The best first.
LOG_NAMES = ("log.txt", "output.log", "train.log", "training.log", "stdout.txt")
LOG_SUFFIXES = (".log", ".out")
# Of W&B.
LOG_FOLDERS = ("files",)


def find_log_file(run: ForeignRun) -> Path | None:
    """Return the log of a run: a file of a usual name, else the `*.log` that was written last; None without one.

    Links are not followed, and a file with metrics is no log.
    """
    metrics = {path for log in run.logs if log.format != text_log.FORMAT for path in log.files}
    top = list_folder(run.folder)
    for folder in (run.folder, *(run.folder / name for name in LOG_FOLDERS if name in top.folders)):
        files = [folder / name for name in list_folder(folder).files if folder / name not in metrics]
        usual = [file for name in LOG_NAMES for file in files if file.name == name]
        others = [file for file in files if file.suffix in LOG_SUFFIXES]
        if usual or others:
            return usual[0] if usual else max(others, key=lambda file: (find_file_stamp(file) or (0, 0, 0))[2])
    return None
