"""Run git in a repository that may be somebody else's: its config starts no program, and nothing in it is written.

A repository that was unpacked from an archive has a `.git/config` of its own. It can name programs for hooks, filters,
the file system monitor, external diffs and transports. Each of them is disabled here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.base.errors import CodedError
from engine.base.text import printable

# Of one command. Network file systems answer in milliseconds per file.
TIMEOUT_SECONDS = 30.0
MAX_MESSAGE_CHARACTERS = 400
# Options precede the config of the repository. Without a pager, hooks and a monitor; paths above ASCII unquoted.
_OPTIONS = (
    "--no-pager",
    "--no-replace-objects",
    *("-c", "core.fsmonitor=false"),
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", "core.quotePath=false"),
    *("-c", "core.untrackedCache=false"),
    *("-c", "core.splitIndex=false"),
    *("-c", "protocol.allow=never"),
    *("-c", "submodule.recurse=false"),
    # The content of larger files is not diffed.
    *("-c", "core.bigFileThreshold=1m"),
)
# No locks for a refreshed index, no questions, and no transport for objects that a partial clone lacks.
_VARIABLES = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "LC_ALL": "C",
}
# The user's own settings. Other variables of git would select another repository or start programs.
_KEPT_PREFIX = "GIT_CONFIG_"
_FILTER_SETTINGS = ("clean", "smudge", "process")


class GitError(CodedError):
    """git has no answer. The message is a clause that follows the name of the repository."""

    code = "not-readable"


@dataclass(frozen=True)
class Repository:
    """The working tree `root` of a git repository, which has the folder or file `.git`."""

    root: Path

    def read(self, *arguments: str, stdin: bytes = b"", exit_codes: Sequence[int] = (0,)) -> bytes:
        """Return the output of a git command. Raises GitError, also for another exit code than these."""
        # `core.worktree` of the repository, or a damaged `.git`, would lead to other files.
        tree = {"GIT_WORK_TREE": str(self.root)}
        return run_git([*self._filter_options, *arguments], self.root, stdin, exit_codes, tree)

    def lines(self, *arguments: str, stdin: bytes = b"") -> list[str]:
        """Return the parts of the output of a git command that ends each with a null byte. Raises GitError."""
        return [os.fsdecode(part) for part in self.read(*arguments, stdin=stdin).split(b"\0")[:-1]]

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The settings that decide what is read: filters, and whether untracked files count. Raises GitError."""
        pattern = r"^(filter\..*|status\.showuntrackedfiles)$"
        # Exit code 1: none is set.
        output = run_git(("config", "-z", "--get-regexp", pattern), self.root, b"", (0, 1), {})
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


def run_git(
    arguments: Sequence[str], cwd: Path, stdin: bytes, exit_codes: Sequence[int], variables: Mapping[str, str]
) -> bytes:
    """Return the output of a git command in a folder, no matter which repository is above it. Raises GitError."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    kept |= {name: value for name, value in os.environ.items() if name.startswith(_KEPT_PREFIX)}
    environment = {**kept, **_VARIABLES, "GIT_CEILING_DIRECTORIES": str(cwd.parent), **variables}
    try:
        done = subprocess.run(  # noqa: S603 (without a shell; see the module)
            ["git", *_OPTIONS, *arguments],  # noqa: S607 (git is where the user has it)
            input=stdin,
            capture_output=True,
            cwd=cwd,
            env=environment,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GitError(f"is not read: git has not ended after {TIMEOUT_SECONDS:g} s", code="timed-out") from error
    except OSError as error:
        raise GitError(f"is not read: git cannot be started ({error.strerror})", code="not-installed") from error
    if done.returncode not in exit_codes:
        # In full: of a repository of another user, the last lines say how to trust it (safe.directory).
        message = " ".join(done.stderr.decode(errors="replace").split()) or "no message"
        raise GitError(f"cannot be read: git: {printable(message[:MAX_MESSAGE_CHARACTERS])}")
    return done.stdout


def find_repository(folder: Path) -> Repository | None:
    """Return the repository whose working tree a folder is in; None if it is in none. Starts no program."""
    real = Path(os.path.realpath(folder))
    root = next((each for each in (real, *real.parents) if os.path.lexists(each / ".git")), None)
    return None if root is None else Repository(root)
