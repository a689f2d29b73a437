"""Commands that outlive their starter."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from engine.jobs.launch.detached import start_detached
from support.gputrain_command import wait_for


def test_start_detached_leaves_no_zombie_of_a_command_that_nobody_waits_for(tmp_path: Path) -> None:
    launched = start_detached([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)
    wait_for(lambda: not psutil.pid_exists(launched.process.pid), "the end of the process")
    assert launched.exit_code == 3
    launched.output.close()
