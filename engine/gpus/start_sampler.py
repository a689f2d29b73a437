"""Starts the process that asks the driver. It takes longest of all that showing the GPUs takes, so this module imports
next to nothing: the process can be started first of all."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = "from engine.gpus.sampler import main; main()"

_ahead: list[subprocess.Popen[bytes]] = []


def start_sampler(wants: str) -> subprocess.Popen[bytes]:
    """`wants` is a line of `Wants`. The process has a session of its own: Ctrl-C and the end of the terminal are not
    for it; it ends when its standard input closes. -P: what lies in the current folder is not taken for our code."""
    return subprocess.Popen(  # noqa: S603 (our own module)
        [sys.executable, "-P", "-c", PROGRAM, wants],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


def start_ahead() -> None:
    """Start one before it is known what will be wanted, for what mostly is: it answers while a command line is imported
    and read."""
    if not os.environ.get("GPUTRAIN_NVML"):
        _ahead.append(start_sampler("{}"))


def started_ahead() -> subprocess.Popen[bytes] | None:
    """The one that was started so, once."""
    return _ahead.pop() if _ahead else None
