"""Starts the sampler process for `monitor`.

The sampler's start dominates the time until GPUs are shown. This module imports almost nothing, so that `tui` can start
the process before its own imports.
"""

from __future__ import annotations

import os
from contextlib import suppress

from engine.base.helper_process import HelperProcess

# Bound of the sampling period. Here, because the CLI does not import the snapshots for its help.
MIN_PERIOD_SECONDS = 0.25
PROGRAM = "from engine.gpus.sampler import main; main()"

_prestarted: list[HelperProcess] = []


def start_sampler(options_line: str) -> HelperProcess:
    """Start the sampler. `options_line` is a `SamplerOptions` in JSON.

    The process exits when its standard input closes. Unlike processes of `start_helper` it survives the thread that
    started it, because a monitor moves between threads.
    """
    return HelperProcess(PROGRAM, options_line, keep_stderr=False)


def prestart_sampler() -> None:
    """Start a sampler with default options, so that it answers while the command line is imported and parsed.

    Does nothing if $GPUTRAIN_NVML is set, or if the process cannot be started: the monitor tries it again.
    """
    if not os.environ.get("GPUTRAIN_NVML"):
        with suppress(OSError):
            _prestarted.append(start_sampler("{}"))


def take_prestarted_sampler() -> HelperProcess | None:
    """Return the prestarted sampler on the first call, else None."""
    return _prestarted.pop() if _prestarted else None
