"""Whether a command may write the file that -o names."""

from __future__ import annotations

import os
from pathlib import Path

from engine.base.errors import UsageError
from engine.base.files import is_folder


def check_output(path: Path, example: str, *, force: bool, although: str = "") -> None:
    """Raise UsageError for a file that cannot be written, or that exists, unless `force`. `although` says more about a
    file that exists. `example` is the name of such a file."""
    if is_folder(path):
        advice = f"name a file in it, such as {path / example}"
        raise UsageError.one("--output", f"{path} is a folder", advice, code="not-a-file")
    if os.path.lexists(path) and not force:
        reason = f"{path} exists{although}; choose another file, or overwrite it with --force"
        raise UsageError.one("--output", reason, code="name-in-use")
    if not is_folder(path.absolute().parent):
        reason = f"there is no folder {path.parent}"
        raise UsageError.one("--output", reason, "create it, or choose another one", code="not-found")
