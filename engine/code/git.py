"""Run git in a repository that may be somebody else's: its config starts no program, and nothing in it is written.

A repository that was unpacked from an archive has a `.git/config` of its own. It can name programs for hooks, filters,
the file system monitor, external diffs and transports. Each of them is disabled here; `engine.code.state` uses commands
that need none.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from engine.utils.errors import CodedError
from engine.utils.text import printable
from engine.utils.trust import describe_user

# All commands for one run together. Network file systems answer in milliseconds per file.
TIMEOUT_SECONDS = 30.0
# A killed process on a file system that does not answer does not end.
END_SECONDS = 1.0
READ_BYTES = 1 << 20
# The names of all files of a repository of a million files.
MAX_OUTPUT_BYTES = 1 << 27
MAX_ERROR_BYTES = 1 << 12
MAX_MEMORY_BYTES = 1 << 32
# Options precede the config of the repository. Without a pager, hooks and a monitor; paths above ASCII unquoted.
_OPTIONS = (
    "--no-pager",
    "--no-replace-objects",
    *("-c", "core.fsmonitor=false"),
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", "core.quotePath=false"),
    *("-c", "core.untrackedCache=false"),
    *("-c", "protocol.allow=never"),
    *("-c", "submodule.recurse=false"),
    # It would put a part of any index that is written into the repository.
    *("-c", "core.splitIndex=false"),
    # The content of larger files is not diffed.
    *("-c", "core.bigFileThreshold=16m"),
)
# No locks for a refreshed index, no questions, and no transport for objects that a partial clone lacks.
_VARIABLES = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "LC_ALL": "C",
}
# The user's own settings. `GIT_CONFIG` alone would have `git config` list those of another file, and other variables of
# git would select another repository or start programs.
_KEPT_PREFIX = "GIT_CONFIG_"
MAX_SETTINGS_BYTES = 1 << 20
_FILTER_SETTINGS = ("clean", "smudge", "process")


class GitError(CodedError):
    """git has no answer. The message is a clause that follows the name of the repository."""

    code = "not-readable"


@dataclass(frozen=True)
class Repository:
    """The working tree `root` of a git repository, which has the folder or file `.git`.

    `deadline` is when its commands must have ended, in monotonic seconds. `variables` are added to their
    environment."""

    root: Path
    deadline: float = field(default_factory=lambda: time.monotonic() + TIMEOUT_SECONDS, compare=False)
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)

    def read(
        self,
        *arguments: str,
        stdin: bytes = b"",
        max_bytes: int = MAX_OUTPUT_BYTES,
        exit_codes: Sequence[int] = (0,),
    ) -> tuple[bytes, bool]:
        """Return the output of a git command, and whether it is complete: at most `max_bytes` are read.

        Raises GitError, also for another exit code than these."""
        return self._read(arguments, stdin, max_bytes, self._filter_options, exit_codes)

    def lines(self, *arguments: str, stdin: bytes = b"", max_bytes: int = MAX_OUTPUT_BYTES) -> list[str]:
        """Return the parts of the output of a git command that ends each with a null byte. Raises GitError."""
        output, is_complete = self.read(*arguments, stdin=stdin, max_bytes=max_bytes)
        # What follows the last null byte is empty, or cut.
        parts = [os.fsdecode(part) for part in output.split(b"\0")[:-1]]
        if not is_complete and not parts:
            raise GitError(f"git {arguments[0]} has one line of more than {max_bytes} bytes")
        return parts

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The settings that decide what is read: filters, and whether untracked files count. Raises GitError."""
        pattern = r"^(filter\..*|status\.showuntrackedfiles)$"
        # Exit code 1: none is set.
        output, is_complete = self._read(("config", "-z", "--get-regexp", pattern), b"", MAX_SETTINGS_BYTES, (), (0, 1))
        if not is_complete:
            # A filter that is not read would not be disabled.
            raise GitError(f"has filters in settings of more than {MAX_SETTINGS_BYTES} bytes", code="too-large")
        pairs = (os.fsdecode(part).partition("\n") for part in output.split(b"\0")[:-1])
        return {name: value for name, _, value in pairs}

    @cached_property
    def _filter_options(self) -> Sequence[str]:
        """The options that disable every filter, whose program would run for each changed file. Raises GitError."""
        names = {name.rpartition(".")[0] for name in self.settings if name.startswith("filter.")}
        if any("=" in name for name in names):
            # `-c` takes the first `=` for the end of the name.
            raise GitError("has a filter whose name contains `=`, which cannot be disabled", code="not-supported")
        settings = [f"{name}.{setting}=" for name in sorted(names) for setting in _FILTER_SETTINGS]
        settings += [f"{name}.required=false" for name in sorted(names)]
        return [option for setting in settings for option in ("-c", setting)]

    def _read(
        self,
        arguments: Sequence[str],
        stdin: bytes,
        max_bytes: int,
        options: Sequence[str],
        exit_codes: Sequence[int] = (0,),
    ) -> tuple[bytes, bool]:
        errors, given = os.memfd_create("git-errors"), os.memfd_create("git-input")
        try:
            os.write(given, stdin) if stdin else None
            os.lseek(given, 0, os.SEEK_SET)
            process = self._start([*_OPTIONS, *options, *arguments], given, errors)
            try:
                output, is_complete = self._read_output(process, max_bytes)
                if is_complete and self._exit_code(process) not in exit_codes:
                    raise self._failure(arguments[0], os.pread(errors, MAX_ERROR_BYTES, 0))
            finally:
                _end(process)
        finally:
            os.close(errors)
            os.close(given)
        return output, is_complete

    def _start(self, arguments: Sequence[str], stdin: int, stderr: int) -> subprocess.Popen[bytes]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or name.startswith(_KEPT_PREFIX)
        }
        # `core.worktree` of the repository, or a damaged `.git`, would lead to other files.
        environment |= {"GIT_WORK_TREE": str(self.root), "GIT_CEILING_DIRECTORIES": str(self.root.parent)}
        try:
            process = subprocess.Popen(  # noqa: S603 (without a shell; see the module)
                [find_git(), *arguments],
                cwd=self.root,
                env={**environment, **_VARIABLES, **self.variables},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise GitError(f"cannot be read: git cannot be started ({error.strerror})") from error
        with suppress(OSError):
            # Compressed objects can be a thousand times as large as their files.
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        return process

    def _read_output(self, process: subprocess.Popen[bytes], max_bytes: int) -> tuple[bytes, bool]:
        assert process.stdout is not None  # noqa: S101 - see `_start`
        descriptor, output = process.stdout.fileno(), bytearray()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(output) <= max_bytes:
            if not poll.poll(1000 * self._seconds_left()):
                raise GitError(f"is not read: git has not answered for {TIMEOUT_SECONDS:g} s", code="timed-out")
            if not (data := os.read(descriptor, READ_BYTES)):
                return bytes(output), True
            output += data
        return bytes(output[:max_bytes]), False

    def _exit_code(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(self._seconds_left())
        except subprocess.TimeoutExpired as error:
            raise GitError(f"is not read: git has not ended after {TIMEOUT_SECONDS:g} s", code="timed-out") from error

    def _seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def _failure(self, command: str, errors: bytes) -> GitError:
        """Return why a command has failed. git refuses the repository of another user (safe.directory)."""
        for path in (self.root, self.root / ".git"):
            with suppress(OSError):
                if (uid := path.lstat().st_uid) not in (os.geteuid(), int(os.environ.get("SUDO_UID", -1))):
                    advice = f"if you trust it: git config --global --add safe.directory '{printable(str(self.root))}'"
                    reason = f"belongs to {describe_user(uid)}, and git does not read it; {advice}"
                    return GitError(reason, code="foreign-owner")
        last = next(iter(reversed(errors.decode(errors="replace").splitlines())), "no message")
        return GitError(f"cannot be read: git {command}: {printable(last)}")


def find_repository(folder: Path) -> Repository | None:
    """Return the repository whose working tree a folder is in; None if it is in none. Starts no program."""
    real = Path(os.path.realpath(folder))
    root = next((each for each in (real, *real.parents) if os.path.lexists(each / ".git")), None)
    return None if root is None else Repository(root)


def find_git() -> str:
    """Return the path of git. A relative folder of PATH could be in the repository. Raises GitError."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    program = shutil.which("git", path=os.pathsep.join(each for each in folders if os.path.isabs(each)))  # noqa: PTH117
    if program is None:
        raise GitError("is not read: git is not installed", code="not-installed")
    return program


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
