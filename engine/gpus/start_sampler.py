"""Starts the process that asks the driver. It takes longest of all that showing the GPUs takes, so this module imports
next to nothing: the process can be started first of all."""

from __future__ import annotations

import os

from engine.utils.helper_process import HelperProcess

PROGRAM = "from engine.gpus.sampler import main; main()"

_prestarted: list[HelperProcess] = []


def start_sampler(options_line: str) -> HelperProcess:
    """`options_line` is a line of `SamplerOptions`. The process ends when its standard input closes. It does not die
    with the thread that starts it, as those of `start_helper` do: a monitor passes from thread to thread."""
    return HelperProcess(PROGRAM, options_line, keep_stderr=False)


def prestart_sampler() -> None:
    """Start one before it is known what will be wanted, for what mostly is: it answers while a command line is imported
    and read."""
    if not os.environ.get("GPUTRAIN_NVML"):
        _prestarted.append(start_sampler("{}"))


def take_prestarted_sampler() -> HelperProcess | None:
    """The one that was started so, once."""
    return _prestarted.pop() if _prestarted else None
