"""User folders, atomic file replacement, file locks and JSON files.

User folders hold the settings, the state and the cached data of this user. They may lie in a folder that all users can
write to, such as a scratch disk, so a file in them is used only if nobody else can change it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engine.base.errors import UsageError
from engine.base.trust import foreign_path_reason
from engine.base.wait import wait_until

# Another process changes a small file within milliseconds. One that holds the lock for longer is not waited for.
LOCK_WAIT_SECONDS = 1.0
# Nobody, not even root, can create a folder in it.
_MISSING_HOME = Path(os.devnull)


def expand_user(path: str) -> Path:
    """Expand `~` and `~user`. Raises UsageError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError.one(path, "there is no such user; use the full path", code="not-found") from error


def is_file(path: Path | str) -> bool:
    """Whether the path is a file. False also if it is inaccessible or invalid."""
    return os.path.isfile(path)  # noqa: PTH113 - `Path.is_file` raises PermissionError


def is_folder(path: Path) -> bool:
    """Whether the path is a folder. False also if it is inaccessible or invalid."""
    return os.path.isdir(path)  # noqa: PTH112 - the method raises PermissionError


def _home() -> Path:
    """Return the user's home, or for a user without one, such as the UID of a container, a path that cannot exist."""
    try:
        return Path.home()
    except RuntimeError:
        return _MISSING_HOME


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel, "" if it is missing or inaccessible."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def file_size(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is missing or inaccessible."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


FileStamp = tuple[int, int, int]
"""Inode, size in bytes and modification time in ns of a file."""


def file_stamp(path: Path) -> FileStamp | None:
    """Return the stamp of a file, None if it is missing. Raises OSError."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return file_number(status.st_ino), status.st_size, status.st_mtime_ns


def find_file_stamp(path: Path) -> FileStamp | None:
    """Return the stamp of a file, None if it is missing or inaccessible."""
    try:
        return file_stamp(path)
    except OSError:
        return None


def file_number(number: int) -> int:
    """Return an inode or device number without its highest bit: the codec bounds no integer above 63 bits."""
    return number & ((1 << 63) - 1)


def cache_folder() -> Path:
    """Return the folder for this user's cached data: $XDG_CACHE_HOME/gputrain."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "gputrain"


def config_folder() -> Path:
    """Return the folder for this user's settings: $XDG_CONFIG_HOME/gputrain."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or _home() / ".config") / "gputrain"


def settings_file() -> Path:
    """Return the path of this user's settings file, which `engine.config.settings` reads."""
    return config_folder() / "settings.yaml"


def state_folder() -> Path:
    """Return the folder for state that outlives a session, like the last choices: $XDG_STATE_HOME/gputrain."""
    return Path(os.environ.get("XDG_STATE_HOME") or _home() / ".local" / "state") / "gputrain"


def user_path_problem(root: Path, name: str = "") -> str | None:
    """Return why the file `name` in a user folder must not be used, as a sentence; None if it may or does not exist.

    Other users must not be able to change the file or any folder from `root` down to it.
    """
    path = root
    for part in ("", *Path(name).parts):
        path /= part
        try:
            reason = foreign_path_reason(path)
        except OSError:
            # Missing or inaccessible: what opens it fails with a better message.
            return None
        if reason is not None:
            return f"{path} {reason}"
    return None


def own_folder_advice(variable: str) -> str:
    """Return what to do about a user folder that other users can change; `variable` sets its location."""
    return f"set {variable} to a folder of your own, or remove write permission for others with `chmod go-w`"


def make_user_folder(root: Path, name: str = "") -> Path:
    """Create the folder `name` in a user folder, and return it.

    Raises OSError if it cannot be created, or if other users can change it.
    """
    folder = make_user_folder(root) / name if name else root
    _make_private(folder)
    if problem := user_path_problem(root, name):
        raise PermissionError(errno.EPERM, problem, str(folder))
    return folder


def _make_private(folder: Path) -> None:
    """Create a folder and its parents with mode 0700, as the XDG Base Directory Specification requires."""
    if folder.parent != folder and not folder.parent.exists():
        _make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def replace_file(
    path: Path, write: Callable[[BinaryIO], object], *, durable: bool = False, private: bool = False
) -> None:
    """Replace `path` atomically: write a temporary file beside it, then rename.

    With `durable`, the file and then its folder are flushed to disk (fsync). Other users cannot read a `private` file.
    On OSError the old content remains.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # A leftover of a killed process with the same PID, or a planted link, is replaced and not written through.
        temporary.unlink(missing_ok=True)
        # Without write permission for others, also under the umask 002 or 000.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(temporary, flags, 0o600 if private else 0o644)
        with os.fdopen(handle, "wb") as file:
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


def overwrite_bytes(path: Path, data: bytes) -> None:
    """Overwrite an existing file in place, which needs no space on a full disk. Raises OSError.

    Blanks replace the rest of a longer file, so that a reader of JSON finds one of the two objects.
    """
    with opened(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK) as handle:
        os.pwrite(handle, data.ljust(os.fstat(handle).st_size), 0)


@contextmanager
def opened(path: Path | str, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Yield a file descriptor, and close it. Raises OSError."""
    handle = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield handle
    finally:
        os.close(handle)


def fsync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it survives a power failure."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as handle:
        os.fsync(handle)


@contextmanager
def opened_folder(path: Path) -> Iterator[Path]:
    """Yield a path that leads to a folder wherever it is moved. Raises OSError for anything else, such as a link."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as handle:
        yield path_of_descriptor(handle)


def path_of_descriptor(fd: int) -> Path:
    """Return a path that leads to an open folder or file of this process, wherever it was moved (proc_pid_fd(5))."""
    return Path(f"/proc/self/fd/{fd}")


def link_file(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy if the file system has no hard links. Replaces `target`."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(source)
    except OSError:
        with source.open("rb") as file:
            replace_file(target, lambda copy: copy.write(file.read()), durable=True)
        return
    temporary.replace(target)


@contextmanager
def exclusive_lock(path: Path, *, private: bool = False) -> Iterator[None]:
    """Hold an exclusive `flock` on a file, which is created if it does not exist. Raises OSError for a link.

    Other users cannot open a `private` file: who can read a file can lock it for as long as they like.
    """
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600 if private else 0o666) as handle:
        if private:
            os.fchmod(handle, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Keep other processes from changing a small file in a folder, so that none of two changes is lost. Raises OSError.

    Whoever can read a folder can lock it for as long as they like, and not every file system has locks, so this waits
    only for `LOCK_WAIT_SECONDS`.
    """
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as handle:

        def has_lock() -> bool:
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        with suppress(OSError):
            wait_until(has_lock, LOCK_WAIT_SECONDS)
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds an exclusive `flock` on the file. Raises OSError if the file cannot be opened."""
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as handle:
        return has_flock(handle)


def has_flock(handle: int) -> bool:
    """Whether another open file holds an exclusive `flock`. Takes a shared one until the descriptor is closed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def open_regular_file(path: Path | str, max_bytes: int | None = None, *, dir_fd: int | None = None) -> BinaryIO:
    """Open a regular file of at most `max_bytes` for reading, without following a link.

    A relative path is relative to the open folder `dir_fd`. Raises OSError for anything else. A named pipe would block,
    a sparse file would fill the memory.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and (max_bytes is None or status.st_size <= max_bytes):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))


def read_bytes(path: Path | str, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes`. Raises OSError, as `open_regular_file` does."""
    return read_file(path, max_bytes)[0]


def read_file(path: Path | str, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Return the content of a regular file of at most `max_bytes`, and its status. Raises OSError, as
    `open_regular_file` does."""
    with open_regular_file(path, max_bytes) as file:
        status = os.fstat(file.fileno())
        # `read` allocates what it is asked for, and a file may grow after it was opened.
        return file.read(min(status.st_size, max_bytes)), status


def append_to_file(path: Path, mode: int = 0o644) -> int:
    """Return a file descriptor that appends to a regular file, which is created with `mode` if it does not exist.

    Raises OSError for anything else, as `open_regular_file` does.
    """
    # O_NONBLOCK: opening a named pipe without a reader fails instead of blocking.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return handle


def delete_oldest_files(folder: Path, max_bytes: int) -> None:
    """Delete the files of a cache that were not used for longest until all together have at most `max_bytes`.

    The time of modification is that of the last use.
    """
    files = []
    for path in folder.iterdir():
        # Another process may delete it now.
        with suppress(FileNotFoundError):
            files.append((path.lstat(), path))
    total_bytes = 0
    for status, path in sorted(files, key=lambda file: -file[0].st_mtime):
        total_bytes += status.st_size
        if total_bytes > max_bytes:
            path.unlink(missing_ok=True)
