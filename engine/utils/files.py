"""Paths as people write them, and files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from engine.utils.errors import UsageError


def expand_user(path: str) -> Path:
    """The path with `~` and `~user` written out. Raises UsageError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError.one(path, "there is no such user; write the folder out") from error


def is_file(path: Path) -> bool:
    """False also where the path cannot be looked at, or cannot be one."""
    try:
        return path.is_file()
    except OSError:
        return False


def cache_folder() -> Path:
    """Where this user keeps what can be found out again: $XDG_CACHE_HOME/gputrain."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gputrain"


def config_folder() -> Path:
    """Where this user's own settings are kept: $XDG_CONFIG_HOME/gputrain."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gputrain"


def state_folder() -> Path:
    """Where is kept what this user did last: $XDG_STATE_HOME/gputrain."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gputrain"


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = False) -> None:
    """Write `path` through a temporary file beside it and a rename. With `durable` it is on the disk on return
    (fsync of the file, then of the folder). Raises OSError and leaves the old content as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_file(source: Path, target: Path) -> None:
    """Give `source` a second name, replacing what bore it; a copy where the file system has no hard links."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(source)
    except OSError:
        with source.open("rb") as file:
            replace_file(target, lambda copy: copy.write(file.read()), durable=True)
        return
    temporary.replace(target)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on this file (`flock`). Raises OSError where it cannot be opened."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(dict(values), indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def open_regular_file(path: Path) -> BinaryIO:
    """Raises OSError also where it is no regular file: of a pipe, reading would wait for a writer."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_json(path: Path) -> dict[str, Any] | None:
    """None where the file is not there, not readable or not a JSON object."""
    try:
        with open_regular_file(path) as file:
            values = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
