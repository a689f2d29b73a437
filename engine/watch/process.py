"""What /proc tells of a process: its tree, use of the host, open files, and the runs that it writes.

Nothing is signaled, traced or written. Of processes of other users, /proc shows the command and the use of CPU and
memory, and neither open files nor the working directory: see proc(5). A process is identified by its ID and its start,
because IDs are reused.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from engine.base.process_table import TICKS_PER_SECOND, ProcessId, ProcessStat, children_by_parent, live_processes
from engine.base.redaction import redact, redact_argv
from engine.base.text import printable
from engine.watch.folders import OWN_FILES, ForeignRun, FoundRuns, RunFinder, SearchLimits, merge_runs

PROC = Path("/proc")
MAX_PROCESSES = 500  # per tree
MAX_OPEN_FILES = 4000  # per process
MAX_COMMAND_CHARS = 400
MAX_WORDS_BYTES = 1 << 17  # of a command line or an environment
# The folder of an open file may have the runs of a day, the working directory may be a home with millions of files.
FILE_LIMITS = SearchLimits(depth=1, folders=200, runs=50)
CWD_LIMITS = SearchLimits(depth=4, folders=1000, runs=200)
MAX_FOLDERS = 100
# Between a rank and the supervisor of its run.
MAX_PARENTS = 3
SEARCH_SECONDS = 5.0
LOG_ENDINGS = (".log", ".out", ".err", ".txt")
# Variables that decide which GPUs, ranks, threads and packages a training uses, and where it logs.
VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "VIRTUAL_ENV", "NVIDIA_VISIBLE_DEVICES",
})  # fmt: skip
VARIABLE_PREFIXES = ("CUDA_", "MASTER_", "CONDA_", "WANDB_", "NCCL_", "PYTORCH_", "SLURM_JOB_", "MLFLOW_", "HF_")


@dataclass(frozen=True)
class HostProcess:
    """A process: who runs what, and the CPU time in seconds and the memory in bytes that it has used.

    `depth` is 0 for the root of a tree, 1 for its children.
    """

    id: ProcessId
    parent: int
    user: str
    command: str
    cpu_seconds: float
    memory_bytes: int
    depth: int = 0


class OpenFile(NamedTuple):
    """A regular file that a process has open for writing. `number` is its descriptor: 1 is stdout, 2 is stderr."""

    path: Path
    number: int


@dataclass(frozen=True)
class ProcessTree:
    """A process and its descendants, parents first. Without processes, it has ended.

    `own_run` is the folder of the run if gputrain runs it. `logs` are the files that its output goes to. `is_hidden`
    tells that /proc does not show the open files of some of them.
    """

    processes: tuple[HostProcess, ...] = ()
    own_run: Path | None = None
    files: tuple[Path, ...] = ()
    logs: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()
    is_hidden: bool = False


@dataclass(frozen=True)
class ProcessDetails:
    """How a process was started, without secrets: its command, and the variables of training and logging that it began
    with. /proc shows `cwd` and `environment` only to its user and to root; to others they are None."""

    command: str
    cwd: str | None = None
    environment: Mapping[str, str] | None = None


def read_details(pid: int) -> ProcessDetails:
    """Return how a process was started."""
    command, cwd, environment = "", None, None
    with suppress(OSError):
        command = shlex.join(redact_argv(_words(pid, "cmdline")))
    with suppress(OSError):
        cwd = str((PROC / str(pid) / "cwd").readlink())
    with suppress(OSError):
        pairs = sorted(variable.split("=", 1) for variable in _words(pid, "environ") if "=" in variable)
        environment = {
            name: redact(name, value)
            for name, value in pairs
            if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
        }
    return ProcessDetails(command, cwd, environment)


def _words(pid: int, name: str) -> list[str]:
    """Return a file of a process whose words end with NUL. Raises OSError if /proc does not show it."""
    with open(f"{PROC}/{pid}/{name}", "rb") as file:  # noqa: PTH123
        return file.read(MAX_WORDS_BYTES).decode(errors="replace").rstrip("\0").split("\0")


def read_tree(root: ProcessId) -> ProcessTree:
    """Return the tree of a process; an empty one if it has ended. A scan of 500 processes takes 20 ms."""
    found = live_processes()
    first = found.get(root.pid)
    if first is None or first.start_ticks != root.start_ticks:
        return ProcessTree()
    tree = _with_files(_describe_trees([root.pid], found))
    pid = first.parent
    for _ in range(MAX_PARENTS if tree.own_run is None else 0):
        # The supervisor of a rank has the files of the run open.
        if (own_run := _own_run(open_files(pid) or ())) is not None:
            return replace(tree, own_run=own_run)
        if (parent := found.get(pid)) is None:
            break
        pid = parent.parent
    return tree


def _describe_trees(roots: Iterable[int], found: dict[int, ProcessStat]) -> list[HostProcess]:
    """Return processes and their descendants among those that were found, parents first."""
    children = children_by_parent(found)
    processes: list[HostProcess] = []
    pending = [(pid, 0) for pid in reversed(list(roots))]
    while pending and len(processes) < MAX_PROCESSES:
        pid, depth = pending.pop()
        processes.append(_describe(pid, found[pid], depth))
        pending += [(child, depth + 1) for child in reversed(children.get(pid, ()))]
    return processes


def _own_run(files: Iterable[OpenFile]) -> Path | None:
    """Return the folder of the run of gputrain that one of the files belongs to; None if none does."""
    folders = dict.fromkeys(file.path.parent for file in files)
    return next((path for path in folders if all((path / name).is_file() for name in OWN_FILES)), None)


def _with_files(processes: Sequence[HostProcess]) -> ProcessTree:
    """Return the tree with what its processes have open."""
    files, logs, folders, own_run, is_hidden = dict[Path, None](), dict[Path, None](), dict[Path, None](), None, False
    for process in processes:
        found = open_files(process.id.pid)
        if found is None:
            is_hidden = True
            continue
        for file in found:
            files[file.path] = None
            if file.number in (1, 2) or file.path.name.endswith(LOG_ENDINGS):
                logs[file.path] = None
        own_run = own_run or _own_run(found)
        if (folder := _working_directory(process.id.pid)) is not None:
            folders[folder] = None
    return ProcessTree(tuple(processes), own_run, tuple(files), tuple(logs), tuple(folders), is_hidden)


def open_files(pid: int) -> list[OpenFile] | None:
    """Return the regular files that a process has open for writing; None if /proc does not show them.

    Links, pipes, devices and deleted files are passed over, and so are files that have another path for this process.
    """
    found = []
    try:
        with os.scandir(PROC / str(pid) / "fd") as entries:
            for entry in islice(entries, MAX_OPEN_FILES):
                path = _written_file(pid, entry.name)
                if path is not None:
                    found.append(OpenFile(path, int(entry.name)))
    except OSError as error:
        return [] if isinstance(error, FileNotFoundError | ProcessLookupError) else None
    return found


def _written_file(pid: int, number: str) -> Path | None:
    descriptor = f"{PROC}/{pid}/fd/{number}"
    try:
        target = os.readlink(descriptor)  # noqa: PTH115 - a Path takes longer
        if not target.startswith("/") or target.startswith(("/dev/", "/proc/", "/sys/")):
            return None
        # The permissions of the link are those that the file was opened with.
        if not os.lstat(descriptor).st_mode & stat.S_IWUSR:
            return None
        opened, named = os.stat(descriptor), os.lstat(target)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    is_same = (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)
    return Path(target) if stat.S_ISREG(named.st_mode) and is_same else None


def _working_directory(pid: int) -> Path | None:
    link = PROC / str(pid) / "cwd"
    try:
        path = link.readlink()
        return path if path != Path("/") and path.samefile(link) else None
    except OSError:
        return None


def find_process_runs(tree: ProcessTree, since: float) -> FoundRuns:
    """Return the runs that a tree of processes writes.

    First those with an open file. Without one, those of the folders of its open files, then of its working directory,
    that were written after `since`, in Unix seconds: trainers open a CSV file for each row. The search is bounded in
    folders and takes at most about `SEARCH_SECONDS`.
    """
    deadline = time.monotonic() + SEARCH_SECONDS
    files = frozenset(tree.files)
    beside = dict.fromkeys(path.parent for path in tree.files)
    found = merge_runs(_search(list(beside)[:MAX_FOLDERS], FILE_LIMITS, deadline))
    if opened := tuple(run for run in found.runs if not files.isdisjoint(_paths(run))):
        # A database has the earlier runs of a process, too.
        return FoundRuns(tuple(run for run in opened if not run.has_ended) or opened, found.is_partial)
    if recent := tuple(run for run in found.runs if run.changed_at() >= since):
        return FoundRuns(recent, found.is_partial)
    found = merge_runs(_search(tree.folders[:MAX_FOLDERS], CWD_LIMITS, deadline))
    return FoundRuns(tuple(run for run in found.runs if run.changed_at() >= since), found.is_partial)


def _search(folders: Sequence[Path], limits: SearchLimits, deadline: float) -> Iterator[FoundRuns]:
    for folder in folders:
        for part in RunFinder(folder, limits).search():
            yield part
            if time.monotonic() > deadline:
                yield FoundRuns((), is_partial=True)
                return


def _paths(run: ForeignRun) -> Iterator[Path]:
    return (path for log in run.logs for path in log.files)


def started_at(process: ProcessId) -> float:
    """Return when a process started, in Unix seconds."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.time() - time.clock_gettime(clock) + process.start_ticks / TICKS_PER_SECOND


def _describe(pid: int, status: ProcessStat, depth: int) -> HostProcess:
    words = [""]
    with suppress(OSError):
        words = _words(pid, "cmdline")
    command = _shown_command(tuple(words)) or f"[{status.name}]"
    return HostProcess(
        ProcessId(pid, status.start_ticks), status.parent, _user_of(pid), printable(command[:MAX_COMMAND_CHARS]),
        status.cpu_seconds, status.memory_bytes, depth,
    )  # fmt: skip


# A tree of 500 processes is read each second.
@lru_cache(maxsize=2 * MAX_PROCESSES)
def _shown_command(words: tuple[str, ...]) -> str:
    return " ".join(redact_argv(words)).strip()


def _user_of(pid: int) -> str:
    try:
        uid = os.stat(f"{PROC}/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return "?"
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"uid {uid}"
