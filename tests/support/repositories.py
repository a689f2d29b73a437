"""Git repositories that tests make."""

from __future__ import annotations

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


def write_files(folder: Path, **files: str) -> None:
    """Write files; `__` in a name stands for `.`."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
