"""The exit codes of `gputrain`: each means the same for every command.

A signal ends a command with 128 and its number, such as 130 after Ctrl-C. The entry points import this module first, so
it imports only what `signal` has loaded anyway.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command, and of a rank."""

    FINISHED = 0
    FAILED = 1
    USAGE_ERROR = 2
    STOPPED = 3
    TIMED_OUT = 124
    """As of timeout(1)."""


class CommandExit(IntEnum):
    """Exit code of `gputrain run -- COMMAND` without one of the command, as of env(1) and docker-run(1).

    A signal that ended the command is 128 and its number."""

    FAILED = 125
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


MEANINGS: dict[int, str] = {
    ExitCode.FINISHED: "success",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE_ERROR: "usage or config error",
    ExitCode.STOPPED: "stopped on request",
    ExitCode.TIMED_OUT: "a time limit is up",
}
"""What the help says about each."""
