"""Git repositories that tests make."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

_IDENTITY = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", *_IDENTITY, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def make_repository(folder: Path, **files: str) -> Path:
    """Make a repository whose first commit has these files; `__` in a name stands for `.`."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet")
    write_files(folder, **files)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "first")
    return folder


def add_submodule(root: Path, inner: Path) -> None:
    """Make a repository with the file `lib.py`, add it as the submodule `inner`, and commit it."""
    make_repository(inner, lib__py="x\n")
    git(root, "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(inner), "inner")
    git(root, "commit", "--quiet", "--message", "module")


def write_files(folder: Path, **files: str) -> None:
    """Write files; `__` in a name stands for `.`."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def file_contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Return digest and modification time of each file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}
