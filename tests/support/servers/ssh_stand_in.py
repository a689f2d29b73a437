"""Stand-in for `ssh` on PATH: it runs the commands of a host here, after lines of a shell that belong to the host.

The lines are what is particular about the host: its variables, the noise of rc files, why it cannot be reached.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.gpus.snapshot import DRIVER, Gpu, Measurement, Snapshot
from engine.runs.run_record import RunRecord
from engine.runs.run_row import RunRow
from tui.cli.console import json_line

PROGRAM = """\
#!/bin/sh
# It reads no configuration.
[ "$1" = -G ] && exit
printf '%s\\n' "$*" >> {folder}/calls
while [ "$1" != -- ]; do shift; done
[ -f "{folder}/hosts/$2" ] || {{ echo "ssh: Could not resolve hostname $2: Name or service not known" >&2; exit 255; }}
cd {folder}/home
. "{folder}/hosts/$2"
exec sh -c "$3"
"""
HOST_KEY_CHANGED = (
    "echo '@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.' >&2; exit 255"
)
CHANGED_WORDS = "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! Host key verification failed."

UNKNOWN: Measurement[Any] = Measurement(None, 0.0)
GPUTRAIN = """\
#!/bin/sh
case $1 in
gpus) cat {folder}/gpus; exec tail -f /dev/null;;
*) cat {folder}/runs; exec tail -f /dev/null;;
esac
"""


def snapshot_line(host: str = "lab1", gpus: int = 2) -> str:
    """Return a line of `gputrain gpus --watch --json` on a host."""
    some = tuple(Gpu(index=i, uuid=f"GPU-{i}", state="ok", age=0.0, time=1.0, processes=UNKNOWN) for i in range(gpus))
    return json_line(Snapshot(time=1.0, host=host, source=DRIVER, driver=UNKNOWN, cuda=UNKNOWN, gpus=some))


def run_line(name: str, host: str = "") -> str:
    """Return a line of `gputrain runs --watch --json` on a host."""
    record = RunRecord(state="running", host=host, started_at=1.0)  # type: ignore[arg-type]
    return json_line(RunRow(name, f"/runs/{name}", "running", record).to_json())


class SshStandIn:
    """Hosts by name. `calls` are the arguments of each call of ssh."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in ("bin", "hosts", "home"):
            (folder / name).mkdir(parents=True)
        program = folder / "bin" / "ssh"
        program.write_text(PROGRAM.format(folder=folder))
        program.chmod(0o755)
        # It has no sockets, and no folder for them is left behind.
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")

    def set_host(self, name: str, *lines: str) -> None:
        """Add a host, or replace its lines; live connections keep the old ones."""
        path = self.folder / "hosts" / name
        path.with_suffix(".new").write_text("".join(f"{line}\n" for line in lines))
        path.with_suffix(".new").replace(path)

    def add_gputrain(self, name: str, gpus: str = "", runs: str = "", *lines: str, program: str = GPUTRAIN) -> None:
        """Add a host with a `program` as gputrain, which prints the given lines, or those of a host without runs."""
        folder = self.folder / f"bin-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "gpus").write_text(f"{gpus or snapshot_line(name)}\n")
        (folder / "runs").write_text(runs or f"{json_line({'listed': 0})}\n")
        (folder / "gputrain").write_text(program.format(folder=folder))
        (folder / "gputrain").chmod(0o755)
        self.set_host(name, f"PATH={folder}:/usr/bin:/bin", *lines)

    @property
    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []
