"""The small process that a waiting run becomes: it keeps the place of the run, and starts it again when that matters.

A run that waits in the queue replaces itself by `python -I -S sleeper.py` (`engine.gpus.waiting`), which holds the same
locks under the same PID in 3 MiB instead of 30. It imports the standard library only, and few modules of it. It renews
the heartbeat of the run and its reservation, and becomes the full program again when there is a signal or a control
request, when its begin time has come, when a run that it waits for has started or ended, when a file of its own is
gone, or when the leader of its user wakes it. The leader is one full program: it reads the driver and the queue, and
wakes the runs that may start. If it ends, one of the sleepers takes its place.

inotify(7) tells of most of that at once. What it misses, such as a request from another host, is found every
`TICK_SECONDS`, or every `CHECK_SECONDS` if it takes more than a stat(2): hundreds of runs may sleep.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time

VARIABLE = "GPUTRAIN_WAITING"
TICK_SECONDS = 10.0  # less than MOVE_TIMEOUT_SECONDS of `engine.runs.claim`
SHORT_TICK_SECONDS = 5.0  # without inotify: Linux gives each user 128 instances
CHECK_SECONDS = 25.0  # less than half of SILENT_SECONDS of `reservation_reader`
# A leader that has not renewed its file for so long hangs or is suspended: another run takes its place.
LEADER_TIMEOUT_SECONDS = 60.0
# SIGINT, SIGUSR1, SIGTERM: the module signal takes as much memory as the rest. They are blocked while a run sleeps, and
# reach the full program.
SIGNALS = (2, 10, 15)
# Of inotify.h.
_CLOSE_WRITE, _MOVED_TO, _CREATE, _DELETE_SELF = 0x8, 0x80, 0x100, 0x400
_FLOCK = struct.Struct("hhqqi")


class Leadership:
    """Leadership of the waiting runs of a user: the `flock` on a file that only this user can open.

    It is open for writing while it is held, so that inotify tells the sleepers when the leader ends, however it does.
    """

    def __init__(self, fds: tuple[int, int]) -> None:
        self.fds = fds

    def renew(self, path: str) -> bool:
        """Show that the leader answers. False if another process has taken its place."""
        try:
            os.utime(self.fds[0])
            return os.path.samestat(os.fstat(self.fds[0]), os.stat(path))
        except OSError:
            return False

    def close(self, path: str = "") -> None:
        """Give it up; `path` is removed, so that nothing stays behind when nobody waits any more."""
        try:
            if path and os.path.samestat(os.fstat(self.fds[0]), os.stat(path)):
                os.unlink(path)
        except OSError:
            pass
        for fd in self.fds:
            os.close(fd)


def try_to_lead(path: str) -> Leadership | None:
    """Take the leadership; None if another process has it and answers. Raises OSError."""
    try:
        if time.time() - os.stat(path).st_mtime > LEADER_TIMEOUT_SECONDS:
            os.unlink(path)
    except FileNotFoundError:
        pass
    # For reading: the end of an attempt must not look like that of a leader.
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.path.samestat(os.fstat(fd), os.fstat(write_fd)):
            os.utime(fd)
            return Leadership((fd, write_fd))
        os.close(write_fd)
    except OSError:
        pass
    os.close(fd)
    return None


def wake(path: str) -> None:
    """Wake the sleeper whose reservation has this private file. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Where there is no inotify, it finds the time.
        os.utime(fd, (0, 0))
    finally:
        os.close(fd)


def is_live(folder_fd: int) -> bool | None:
    """Whether the owner of a run folder holds its write lock; None if the folder was deleted or cannot be read."""
    try:
        if os.fstat(folder_fd).st_nlink == 0:
            return None
        lock_fd = os.open("lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError:
        return None
    try:
        query = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        return bool(_FLOCK.unpack_from(fcntl.fcntl(lock_fd, fcntl.F_OFD_GETLK, query))[0] == fcntl.F_WRLCK)
    except OSError:
        return None
    finally:
        os.close(lock_fd)


class _Sleeper:
    """`spec` is what `engine.gpus.waiting.Sleep` writes."""

    def __init__(self, spec: dict) -> None:  # type: ignore[type-arg]
        self._spec = spec
        self._folder_fd: int = spec["folder_fd"]
        self._lock_path, self._lock_fd = spec["reservation"]
        self._private = self._lock_path.removesuffix(".lock") + ".folder"
        self._entry = self._lock_path.removesuffix(".lock") + ".json"
        self._leader: str = spec["leader"]
        for fd in (self._folder_fd, *(fd for fd, _ in spec["followed"])):
            os.set_inheritable(fd, False)
        self._owner = os.stat("owner.json", dir_fd=self._folder_fd).st_ino
        self._libc = ctypes.CDLL(None)
        self._signals = int(self._libc.signalfd(-1, _signal_set(), os.O_CLOEXEC))
        self._inotify = int(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        self._check_at = 0.0
        self._control = f"/proc/self/fd/{self._folder_fd}/control"
        self._watch(self._control, _MOVED_TO | _CREATE)
        self._watch(self._private, _CLOSE_WRITE)
        for fd, _ in spec["followed"]:
            self._watch(f"/proc/self/fd/{fd}/lock", _CLOSE_WRITE)
        self._changed_at = os.stat(self._control).st_mtime
        # What has arrived before is not announced.
        self._has_requests = bool(os.listdir(self._control))

    def _watch(self, path: str, mask: int) -> None:
        if self._inotify >= 0:
            self._libc.inotify_add_watch(self._inotify, os.fsencode(path), mask)

    def run(self) -> None:
        """Return when the full program has something to do. Raises OSError if a file of its own is gone."""
        while not self._is_due():
            begin = self._spec["begin"]
            left = begin - time.time() if begin else TICK_SECONDS
            tick = TICK_SECONDS if self._inotify >= 0 else SHORT_TICK_SECONDS
            fds = [fd for fd in (self._signals, self._inotify) if fd >= 0]
            ready = select.select(fds, [], [], max(min(left, tick), 0.0))[0]
            if self._signals in ready:
                # It stays pending, for the full program.
                return
            if ready:
                os.read(self._inotify, 1 << 16)
                # The leader may have ended.
                self._check_at = 0.0

    def _is_due(self) -> bool:
        spec, now = self._spec, time.time()
        if spec["begin"] and now >= spec["begin"]:
            return True
        os.utime("owner.json", dir_fd=self._folder_fd)
        if self._has_requests or os.stat(self._control).st_mtime != self._changed_at:
            return True
        if os.stat(self._private).st_mtime == 0:
            return True
        if any(is_live(fd) is not known for fd, known in spec["followed"]):
            return True
        if time.monotonic() < self._check_at:
            return False
        self._check_at = time.monotonic() + CHECK_SECONDS
        # Another host replaces the file if it takes the run over.
        is_own = os.stat("owner.json", dir_fd=self._folder_fd).st_ino == self._owner and is_live(self._folder_fd)
        if not is_own or not os.path.samestat(os.fstat(self._lock_fd), os.stat(self._lock_path)):
            return True
        os.utime(self._entry)
        os.pread(self._lock_fd, 1, 0)
        return bool(self._leader) and self._leads()

    def _leads(self) -> bool:
        leadership = try_to_lead(self._leader)
        if leadership is None:
            self._watch(self._leader, _CLOSE_WRITE | _DELETE_SELF)
            return False
        self._spec["leadership"] = leadership.fds
        for fd in leadership.fds:
            os.set_inheritable(fd, True)
        return True


def _signal_set() -> ctypes.Array[ctypes.c_char]:
    """Return the `sigset_t` of `SIGNALS`, of 1024 bits."""
    bits = sum(1 << (number - 1) for number in SIGNALS)
    return ctypes.create_string_buffer(bits.to_bytes(8, sys.byteorder), 128)


def main() -> None:
    """Sleep, and become the full program again."""
    # Literals only. The module json takes memory.
    spec = eval(os.environ[VARIABLE], {"__builtins__": {}})  # noqa: S307 - written by this user's own process
    # contextlib takes memory.
    try:  # noqa: SIM105
        _Sleeper(spec).run()
    except OSError:
        pass
    os.environ[VARIABLE] = repr(spec)
    while True:
        try:
            os.execve(spec["argv"][0], spec["argv"], os.environ)  # noqa: S606 - our own program
        except OSError:
            # The program is being replaced by another version.
            time.sleep(TICK_SECONDS)


if __name__ == "__main__":
    main()
    sys.exit(1)
