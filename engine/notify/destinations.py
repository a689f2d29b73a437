"""Read the apprise URLs that `notify.urls` refers to, and those in the user's own file.

A URL contains secrets, so it exists only in memory here. Whatever is stored or shown is the label of a destination.
No module that this one imports is heavy: the watcher of each run imports it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.utils.errors import Problem, UsageError, collect_problems
from engine.utils.files import config_folder, own_folder_advice, read_bytes, user_path_problem

USER_FILE = "notify"
MAX_FILE_BYTES = 1 << 16
MAX_DESTINATIONS = 20
MAX_URL_CHARS = 4096
_URL = re.compile(r"[A-Za-z0-9]{2,20}://\S+")


@dataclass(frozen=True)
class Destination:
    """One apprise URL. `label` names it without its content: `env:NAME`, or a file and the number of the line."""

    label: str
    url: str = field(repr=False)


@dataclass(frozen=True)
class Destinations:
    """The destinations that could be read, and the problem of each reference that could not."""

    found: list[Destination]
    problems: list[Problem]


def user_file() -> Path:
    """Return the path of the user's file of URLs for all runs: `$XDG_CONFIG_HOME/gputrain/notify`."""
    return config_folder() / USER_FILE


def has_destinations(references: Iterable[str]) -> bool:
    """Whether a run has something to send messages to: references, or the user's file."""
    return any(True for _ in references) or os.path.lexists(user_file())


def read_destinations(references: Iterable[str], environment: Mapping[str, str] = os.environ) -> Destinations:
    """Return the destinations of `notify.urls` and of the user's file, each URL once."""
    problems, lines = list[Problem](), list[Destination]()
    for reference in references:
        kind, _, name = reference.partition(":")
        with collect_problems(problems):
            lines += (
                _read_variable(name, reference, environment) if kind == "env" else _read_file(Path(name), reference)
            )
    path = user_file()
    if os.path.lexists(path):
        with collect_problems(problems):
            if (problem := user_path_problem(path.parent, USER_FILE)) is not None:
                reason = f"{path} is not used, because {problem}; {own_folder_advice('XDG_CONFIG_HOME')}"
                raise UsageError.one("", reason, code="foreign-writable")
            lines += _read_file(path, str(path))
    found: dict[str, Destination] = {}
    for line in lines:
        if len(line.url) > MAX_URL_CHARS or _URL.fullmatch(line.url) is None:
            reason = f"{line.label} is not an apprise URL such as ntfy://TOPIC"
            problems.append(Problem("", reason, code="invalid-value"))
        else:
            found.setdefault(line.url, line)
    if len(found) > MAX_DESTINATIONS:
        reason = f"only the first {MAX_DESTINATIONS} of {len(found)} notification URLs are used"
        problems.append(Problem("", reason, code="too-many"))
    return Destinations(list(found.values())[:MAX_DESTINATIONS], problems)


def _read_variable(name: str, label: str, environment: Mapping[str, str]) -> list[Destination]:
    url = environment.get(name, "").strip()
    if not url:
        reason = f"{label}: the environment variable {name} is not set; export {name}=URL"
        raise UsageError.one("", reason, code="missing-value")
    return [Destination(label, url)]


def _read_file(path: Path, label: str) -> list[Destination]:
    """Return the lines of a file: one URL per line, empty lines and lines that begin with # are skipped. Raises
    UsageError."""
    try:
        # It may be a link, as programs that manage dotfiles make it. What counts is the file that it leads to.
        target = path.resolve()
        status = target.stat()
        if status.st_uid != os.geteuid():
            reason = f"{label} is not used: it belongs to another user; copy it to a file of your own"
            raise UsageError.one("", reason, code="foreign-owner")
        if stat.S_IMODE(status.st_mode) & 0o077:
            reason = f"{label} is not used: other users may read it; run chmod 600 {path}"
            raise UsageError.one("", reason, code="foreign-readable")
        text = read_bytes(target, MAX_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise UsageError.one("", f"{label} is not UTF-8 text", code="wrong-format") from error
    except (OSError, RuntimeError) as error:
        reason = f"{label} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError.one("", reason, code="not-readable") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    urls = [Destination(f"{label} line {number}", line) for number, line in lines if line and not line.startswith("#")]
    if not urls:
        raise UsageError.one("", f"{label} contains no URL; write one apprise URL per line", code="missing-value")
    return urls
