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

from engine.utils.errors import Problem
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
    result = Destinations([], [])
    for reference in references:
        kind, _, name = reference.partition(":")
        if kind == "env":
            _read_variable(name, reference, environment, result)
        elif kind == "file":
            _read_file(Path(name), reference, result)
    path = user_file()
    if os.path.lexists(path):
        if (problem := user_path_problem(path.parent, USER_FILE)) is not None:
            reason = f"{path} is not used, because {problem}; {own_folder_advice('XDG_CONFIG_HOME')}"
            result.problems.append(Problem("", reason, code="foreign-writable"))
        else:
            _read_file(path, str(path), result)
    unique = {destination.url: destination for destination in reversed(result.found)}
    kept = [destination for destination in result.found if unique[destination.url] is destination]
    if len(kept) > MAX_DESTINATIONS:
        reason = f"only the first {MAX_DESTINATIONS} of {len(kept)} notification URLs are used"
        result.problems.append(Problem("", reason, code="too-many"))
    return Destinations(kept[:MAX_DESTINATIONS], result.problems)


def _read_variable(name: str, label: str, environment: Mapping[str, str], result: Destinations) -> None:
    url = environment.get(name, "").strip()
    if not url:
        reason = f"{label}: the environment variable {name} is not set; export {name}=URL"
        result.problems.append(Problem("", reason, code="missing-value"))
    else:
        _add_url(label, url, result)


def _read_file(path: Path, label: str, result: Destinations) -> None:
    """Add the URLs of a file: one per line, empty lines and lines that begin with # are skipped."""
    try:
        # It may be a link, as programs that manage dotfiles make it. What counts is the file that it leads to.
        target = path.resolve()
        status = target.stat()
        if status.st_uid != os.geteuid():
            reason = f"{label} is not used: it belongs to another user; copy it to a file of your own"
            result.problems.append(Problem("", reason, code="foreign-owner"))
            return
        if stat.S_IMODE(status.st_mode) & 0o077:
            reason = f"{label} is not used: other users may read it; run chmod 600 {path}"
            result.problems.append(Problem("", reason, code="foreign-readable"))
            return
        text = read_bytes(target, MAX_FILE_BYTES).decode()
    except UnicodeDecodeError:
        result.problems.append(Problem("", f"{label} is not UTF-8 text", code="wrong-format"))
        return
    except (OSError, RuntimeError) as error:
        reason = f"{label} cannot be read: {getattr(error, 'strerror', None) or error}"
        result.problems.append(Problem("", reason, code="not-readable"))
        return
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    urls = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not urls:
        reason = f"{label} contains no URL; write one apprise URL per line"
        result.problems.append(Problem("", reason, code="missing-value"))
    for number, url in urls:
        _add_url(f"{label} line {number}", url, result)


def _add_url(label: str, url: str, result: Destinations) -> None:
    if len(url) > MAX_URL_CHARS or _URL.fullmatch(url) is None:
        result.problems.append(Problem("", f"{label} is not an apprise URL such as ntfy://TOPIC", code="invalid-value"))
    else:
        result.found.append(Destination(label, url))
