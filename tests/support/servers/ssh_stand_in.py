"""Stand-in for `ssh` on PATH: it runs the commands of a host here, after lines of a shell that belong to the host.

The lines are what is particular about the host: its variables, the noise of rc files, why it cannot be reached.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROGRAM = """\
#!/bin/sh
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


class SshStandIn:
    """Hosts by name. `calls` are the arguments of each call of ssh."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in ("bin", "hosts", "home"):
            (folder / name).mkdir(parents=True)
        program = folder / "bin" / "ssh"
        program.write_text(PROGRAM.format(folder=folder))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")

    def set_host(self, name: str, *lines: str) -> None:
        """Add a host, or replace its lines; live connections keep the old ones."""
        path = self.folder / "hosts" / name
        path.with_suffix(".new").write_text("".join(f"{line}\n" for line in lines))
        path.with_suffix(".new").replace(path)

    @property
    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []
