"""Read the apprise URLs that `notify.urls` refers to, and those in the user's own file.

A URL contains secrets, so it exists only in memory here. Whatever is stored or shown is the label of a destination.
No module that this one imports is heavy: the watcher of each run imports it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.utils.errors import Problem, UsageError, collect_problems
from engine.utils.files import config_folder, read_bytes

USER_FILE = "notify"
MAX_FILE_BYTES = 1 << 16
_URL = re.compile(r"[A-Za-z0-9]{2,20}://\S+")


class Destination(NamedTuple):
    """One apprise URL. `label` names it without its content: `env:NAME`, or a file and the number of the line."""

    label: str
    url: str

    def __repr__(self) -> str:
        return self.label


def user_file() -> Path:
    """Return the path of the user's file of URLs for all runs: `$XDG_CONFIG_HOME/gputrain/notify`."""
    return config_folder() / USER_FILE


def has_destinations(references: Iterable[str]) -> bool:
    """Whether a run has something to send messages to: references, or the user's file."""
    return any(True for _ in references) or _has_user_file()


def _has_user_file() -> bool:
    # `Path.exists` raises PermissionError, as where another user's home is this process's.
    return os.access(user_file(), os.F_OK)


def read_destinations(
    references: Iterable[str], environment: Mapping[str, str] = os.environ
) -> tuple[list[Destination], list[Problem]]:
    """Return the destinations of `notify.urls` and of the user's file, each URL once, and why others cannot be read."""
    problems, found = list[Problem](), dict[str, Destination]()
    sources = [*references, *([f"file:{user_file()}"] if _has_user_file() else [])]
    for source in sources:
        kind, _, name = source.partition(":")
        with collect_problems(problems):
            if kind == "file":
                destinations = _read_file(Path(name), source)
            elif url := environment.get(name, "").strip():
                destinations = [Destination(source, url)]
            else:
                reason = f"{source}: the environment variable {name} is not set; export {name}=URL"
                raise UsageError.one("", reason, code="missing-value")
            for destination in destinations:
                if _URL.fullmatch(destination.url) is None:
                    reason = f"{destination.label} is not an apprise URL such as ntfy://TOPIC"
                    problems.append(Problem("", reason, code="invalid-value"))
                else:
                    found.setdefault(destination.url, destination)
    return [*found.values()], problems


def _read_file(path: Path, label: str) -> list[Destination]:
    """Return the lines of a file: one URL per line, empty lines and lines that begin with # are skipped. Raises
    UsageError."""
    try:
        # It may be a link, as programs that manage dotfiles make it. What counts is the file that it leads to.
        target = path.resolve()
        status = target.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            reason = f"{label} is not used: other users may read it; it must be yours, chmod 600 {path}"
            raise UsageError.one("", reason, code="foreign-readable")
        text = read_bytes(target, MAX_FILE_BYTES).decode()
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = f"{label} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError.one("", reason, code="not-readable") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    urls = [Destination(f"{label} line {number}", line) for number, line in lines if line and not line.startswith("#")]
    if not urls:
        raise UsageError.one("", f"{label} contains no URL; write one apprise URL per line", code="missing-value")
    return urls
