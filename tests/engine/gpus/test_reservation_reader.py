"""Reservations that another user planted: read strictly, without blocking, and judged by the owner of their files."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from engine.base.errors import Problem
from engine.base.locks import take_write_lock
from engine.gpus import reservation_reader
from engine.gpus.reservation import Reservation
from engine.gpus.reservation_entry import ReservationInfo, ReservedRank
from engine.gpus.reservation_reader import read_reservations
from support.messages import has_problem, raises_problem

SOMEONE = 12345
ENTRY = {
    "format": 1, "run": "planted", "uid": 0, "lock_name": "x", "since": 1.0, "selection": "all", "visible": ["GPU-1"],
    "gpus": ["GPU-1"], "ranks": [], "priority": 0, "blocked": "", "share": 1,
}  # fmt: skip
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    return tmp_path


@pytest.fixture
def folder(base: Path) -> Path:
    path = base / f"gputrain-{os.getuid()}"
    path.mkdir()
    return path


@pytest.fixture
def reservation(base: Path) -> Iterator[Reservation]:
    """An honest reservation beside the planted ones."""
    own = Reservation()
    own.reserve(["GPU-7"], "auto", ["GPU-7"], "honest")
    yield own
    own.release()


_locks: list[int] = []


@pytest.fixture(autouse=True)
def close_locks() -> Iterator[None]:
    yield
    while _locks:
        os.close(_locks.pop())


def plant(folder: Path, values: Any, name: str = "1-2") -> None:
    """Write an entry, and lock it."""
    (folder / f"{name}.json").write_text(values if isinstance(values, str) else json.dumps(values))
    lock_fd = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    assert take_write_lock(lock_fd)
    _locks.append(lock_fd)


def read() -> tuple[list[ReservationInfo], list[Problem]]:
    ignored: list[Problem] = []
    return read_reservations(report=ignored.append), ignored


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"later": math.inf}, "JSON"),
        ({"since": 10**400}, "since"),
        ({"visible": ["GPU-1"] * 2000}, "visible"),
        ({"ranks": [{"run": "a", "rank": 0, "pid": 1 << 40, "uuid": "GPU-1"}]}, "pid"),
        ({"min_free": 1 << 60}, "min_free"),
        ({"format": 2}, "format 2"),
        ({"gpus": [1]}, "gpus"),
        ({"gpus": [], "share": 0}, "share"),
    ],
)
def test_entry_that_cannot_be_read_is_reported_and_ignored(
    folder: Path, reservation: Reservation, change: dict[str, Any], key: str
) -> None:
    plant(folder, ENTRY | change)
    [found], [ignored] = read()
    assert found.run == "honest"
    assert has_problem([ignored], "damaged", "", "ignored: 1 ", f": {folder.name}/1-2.lock ", key)


def test_entry_with_terms_of_its_user_is_read(folder: Path) -> None:
    terms = {"priority": -1000, "position": 2.5, "blocked": "held", "share": 4, "reason": "held"}
    terms |= {"min_free": 20 << 30, "begin": 7.0}
    plant(folder, ENTRY | terms | {"folder": "/runs/a"})
    [found], ignored = read()
    assert {name: getattr(found, name) for name in terms} == terms
    assert (found.run_folder(), ignored) == ("/runs/a", [])


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(30 << 30)


@pytest.mark.parametrize("suffix", [".json", ".lock"])
@pytest.mark.parametrize("create", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/etc/hostname"), make_sparse])
def test_entry_that_is_no_small_regular_file_does_not_block_or_raise(
    folder: Path, reservation: Reservation, create: Callable[[Path], None], suffix: str
) -> None:
    plant(folder, ENTRY)
    (folder / f"1-2{suffix}").unlink()
    create(folder / f"1-2{suffix}")
    found, ignored = read()
    assert [each.run for each in found] == ["honest"]
    # A lock file of any size that nobody holds is a stale entry.
    assert len(ignored) == (0 if create is make_sparse and suffix == ".lock" else 1)


@pytest.mark.parametrize(("age_s", "is_reported"), [(0.0, False), (3600.0, True)])
def test_lock_without_permission_is_reported_if_it_is_old(
    folder: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, is_reported: bool
) -> None:
    def refuse(*_: object, **__: object) -> BinaryIO:
        raise PermissionError(errno.EACCES, "Permission denied")

    plant(folder, ENTRY)
    monkeypatch.setattr(reservation_reader, "open_regular_file", refuse)
    now = time.time()
    monkeypatch.setattr(reservation_reader, "time", SimpleNamespace(time=lambda: now + age_s))
    found, ignored = read()
    assert found == []
    assert len(ignored) == is_reported
    assert not is_reported or has_problem(ignored, "damaged", "", "1-2.lock ", "(Permission denied)")


def test_reservation_that_cannot_be_locked_leaves_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, mode: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    num_fds = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched, raises_problem("not-writable", "device.gpus", "Input/output error"):
        patched.setattr(os, "fchmod", fail)
        Reservation().reserve(["GPU-1"], "all", ["GPU-1"], "mine")
    assert (list(base.iterdir()), len(list(Path("/proc/self/fd").iterdir()))) == ([], num_fds)


@pytest.mark.parametrize("limit", ["MAX_FILES_PER_USER", "MAX_BYTES_PER_USER"])
def test_user_with_more_entries_than_are_read_is_reported(
    base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    second = base / f"{folder.name}-2"
    second.mkdir()
    for number in range(4):
        plant(second if number % 2 else folder, ENTRY, str(number))
    _, ignored = read()
    assert ignored == []
    monkeypatch.setattr(reservation_reader, limit, 9 if limit == "MAX_FILES_PER_USER" else 2 * len(json.dumps(ENTRY)))
    _, [problem] = read()
    assert has_problem([problem], "damaged", "", "ignored", folder.name)


def test_run_name_cannot_control_the_terminal_or_imitate_a_message(folder: Path) -> None:
    plant(folder, ENTRY | {"run": "\x1b[2J; GPU 1: lost (user root)"})
    [found], _ = read()
    assert found.run == "__2J__GPU_1__lost__user_root_"


def test_rank_of_process_of_another_user_is_ignored(folder: Path) -> None:
    own, no_such_pid = os.getpid(), 1 << 22
    pids = [own, no_such_pid]
    sleeper = subprocess.Popen(["sleep", "100"], **({"user": SOMEONE} if os.geteuid() == 0 else {}))
    try:
        foreign = sleeper.pid if os.geteuid() == 0 else 1
        ranks = [
            {"run": "other", "rank": number, "pid": pid, "uuid": "GPU-1"} for number, pid in enumerate([*pids, foreign])
        ]
        plant(folder, ENTRY | {"ranks": ranks})
        [found], _ = read()
        assert found.ranks == tuple(ReservedRank("planted", number, pid, "GPU-1") for number, pid in enumerate(pids))
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize(("age_s", "is_silent"), [(61, True), (30, False)])
def test_supervisor_that_does_not_renew_its_entry_is_silent(folder: Path, age_s: int, is_silent: bool) -> None:
    plant(folder, ENTRY)
    os.utime(folder / "1-2.json", (time.time() - age_s,) * 2)
    [found], _ = read()
    assert found.is_silent == is_silent


def test_place_in_queue_is_not_before_creation_of_lock_file(folder: Path, base: Path) -> None:
    waiting = Reservation()
    waiting.enqueue("free:1", ["GPU-1"], "honest")
    plant(folder, ENTRY | {"gpus": [], "since": 1.0})
    found, _ = read()
    assert [each.run for each in found] == ["honest", "planted"]
    assert found[0].since == waiting.since
    waiting.release()


@pytest.mark.parametrize("is_published", [True, False])
def test_files_of_dead_run_are_removed_only_on_request_and_once_published(
    folder: Path, reservation: Reservation, is_published: bool
) -> None:
    plant(folder, ENTRY)
    os.close(_locks.pop())
    dead = [folder / "1-2.json", folder / "1-2.lock"]
    # A new lock file gets its final mode once it is locked.
    dead[1].chmod(0o644 if is_published else 0o600)
    assert [each.run for each in read_reservations()] == ["honest"]
    assert [path.exists() for path in dead] == [True, True]
    assert [each.run for each in read_reservations(remove_stale=True)] == ["honest"]
    assert [path.exists() for path in dead] == [not is_published] * 2


RUN = """
import os, sys
from engine.gpus.reservation import Reservation
own = Reservation()
own.reserve(["GPU-1"], "all", ["GPU-1"], "dead")
print(own._lock_path, flush=True)
sys.stdin.read()
os._exit(1)
"""
LOCKER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print("opened", flush=True)
fcntl.flock(fd, fcntl.LOCK_EX)
fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, __import__("struct").pack("hhqqi", fcntl.F_RDLCK, 0, 0, 0, 0))
print("locked", flush=True)
sys.stdin.read()
"""


def test_other_user_cannot_keep_reservation_of_dead_run_alive(base: Path) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    run = subprocess.Popen([sys.executable, "-c", RUN], **pipes)
    assert run.stdout is not None
    lock = run.stdout.readline().strip()
    assert [each.run for each in read_reservations()] == ["dead"]
    # Read-only, as another user can open it.
    locker = subprocess.Popen([sys.executable, "-c", LOCKER, lock], **pipes)
    assert locker.stdout is not None
    assert locker.stdout.readline() == "opened\n"
    run.communicate()
    assert locker.stdout.readline() == "locked\n"
    assert read_reservations(remove_stale=True) == []
    locker.communicate()
    assert list(base.iterdir()) == []


def test_folder_that_is_removed_while_it_is_read_is_not_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = reservation_reader.opened

    def remove_first(path: Path, flags: int) -> AbstractContextManager[int]:
        folder.rmdir()
        return opened(path, flags)

    with monkeypatch.context() as patched:
        patched.setattr(reservation_reader, "opened", remove_first)
        assert read() == ([], [])
    assert not folder.exists()


@as_root
def test_entry_is_judged_by_owner_of_its_files(folder: Path, base: Path, reservation: Reservation) -> None:
    foreign = base / f"gputrain-{SOMEONE}"
    foreign.mkdir()
    plant(foreign, ENTRY)
    os.chown(foreign, SOMEONE, -1)
    found, [ignored] = read()
    assert [each.run for each in found] == ["honest"]
    assert has_problem([ignored], "damaged", "", "gputrain-12345/1-2.lock ", "root (uid 0)")
    os.chown(foreign / "1-2.lock", SOMEONE, -1)
    found, [ignored] = read()
    assert [each.run for each in found] == ["honest"]
    assert has_problem([ignored], "damaged", "", "gputrain-12345/1-2.lock ")
    os.chown(foreign / "1-2.json", SOMEONE, -1)
    found, ignored_now = read()
    assert [(each.run, each.user) for each in found] == [("honest", "root"), ("planted", f"uid {SOMEONE}")]
    assert ignored_now == []


@as_root
@pytest.mark.parametrize("create", [Path.mkdir, os.mkfifo, Path.touch])
def test_reservation_when_another_user_has_taken_the_folder_name(base: Path, create: Callable[[Path], None]) -> None:
    taken = base / f"gputrain-{os.getuid()}"
    create(taken)
    os.chown(taken, SOMEONE, -1)
    own, second = Reservation(), Reservation()
    own.reserve(["GPU-1"], "all", ["GPU-1"], "mine")
    second.reserve(["GPU-2"], "all", ["GPU-2"], "second")
    found, [ignored] = read()
    assert [each.run for each in found] == ["mine", "second"]
    assert has_problem([ignored], "damaged", "", " 1 ", f"uid {SOMEONE} in {base}: {taken.name} ")
    [folder] = base.glob(f"{taken.name}-*")
    assert folder.stat().st_mode & 0o777 == 0o755
    own.release()
    second.release()
    assert list(base.iterdir()) == [taken]
