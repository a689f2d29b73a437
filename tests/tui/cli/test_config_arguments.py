"""CONFIG as it is typed."""

from __future__ import annotations

import os
from pathlib import Path

from support.messages import says
from support.runs.trained_run import call


def test_pipe_is_no_config(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    result = call("config", fifo)
    assert result.exit_code == 2 and says(result.stderr, "not-a-file", fifo)
