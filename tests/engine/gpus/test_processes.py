"""Processes on a GPU as the host describes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from engine.base.codec import decode, encode
from engine.gpus.nvml_processes import NvmlProcess
from engine.gpus.processes import ProcessTable
from engine.gpus.snapshot import GpuProcess, Measurement
from support.gputrain_command import wait_for


def test_process_table_keeps_command_that_is_no_utf8() -> None:
    with subprocess.Popen(["cat", "-", b"\xff"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        # The kernel sets the command line shortly after it has started the program.
        wait_for(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes() != b"", "its command line")
        listed = NvmlProcess(process.pid, "compute", None, None, Measurement(1 << 20, 1.0, unit="B"))
        [described] = ProcessTable().describe([listed], [])
    assert described.command.value == "cat - \udcff"
    assert decode(encode(described), GpuProcess) == described
