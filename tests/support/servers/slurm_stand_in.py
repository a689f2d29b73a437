"""Stand-ins for Slurm's commands on PATH: files say what they answer, and they note how they were called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.runs.batch.states import ENGINES, forget

TOOLS: Mapping[str, str] = {
    "sbatch": 'cp "$2" script && echo "$(cat job)"',
    "sinfo": "cat sinfo",
    "squeue": "cat squeue",
    "sacct": "cat sacct",
    "scancel": ": > squeue",
    "srun": "exit 1",
}


class SlurmStandIn:
    """A cluster whose only job is number 7. `calls` are the commands that were called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tools, self._folder = folder / "bin", folder / "answers"
        for each in (self._tools, self._folder):
            each.mkdir(parents=True)
        self.tell("sinfo", "gpu:a100:4(S:0-1)|64\n")
        self.tell("squeue", "")
        self.tell("job", "7;lab\n")
        for tool, line in TOOLS.items():
            self.set_tool(tool, line)
        monkeypatch.setenv("PATH", f"{self._tools}:/usr/bin:/bin")

    def tell(self, name: str, text: str) -> None:
        """Set what a command prints from the next question on; sacct fails before the first text."""
        (self._folder / name).write_text(text)
        self.ask_again()

    def set_tool(self, tool: str, line: str) -> None:
        """Let a command run a line of a shell."""
        path = self._tools / tool
        path.write_text(f'#!/bin/sh\ncd {self._folder} || exit 1\necho "{tool} $*" >> calls\n{line}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """The commands that were called, with their arguments."""
        return (self._folder / "calls").read_text().splitlines()

    @property
    def script(self) -> str:
        """The script that was submitted last."""
        return (self._folder / "script").read_text()

    def ask_again(self) -> None:
        """Let the next question reach the commands."""
        for engine in ENGINES:
            forget(engine)
