"""The stage of an attack: a shared folder, a second user who plants files in it, and this user, who runs gputrain.

Every other file here is one attack. `python tests/attacks/NAME.py` prints what the attacker gained, and fails unless
that is nothing. It needs root, because it becomes the second user through setpriv.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ATTACKER_UID = 12345
SKIPPED_EXIT_CODE = 77


class Stage:
    """`shared` is a folder like /tmp, writable by all and sticky. `home` is the victim's home and working folder."""

    def __init__(self, root: Path) -> None:
        self.shared, self.home = root / "shared", root / "home"
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        self.home.mkdir(mode=0o700)
        folders = {name: str(self.home / name) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
        self.environment = {
            **os.environ,
            **folders,
            "HOME": str(self.home),
            "GPUTRAIN_RUNS": str(self.shared / "runs"),
            "GPUTRAIN_RESERVATIONS": str(self.shared),
        }
        self.gains: list[str] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def as_attacker(self, program: str, *arguments: str | Path) -> str:
        """Run Python code as the attacker in `shared`, and return its output. It cannot import gputrain."""
        identity = [f"--reuid={ATTACKER_UID}", f"--regid={ATTACKER_UID}", "--clear-groups"]
        return self.as_victim(program, *arguments, prefix=["setpriv", *identity])

    def as_victim(
        self, program: str, *arguments: str | Path, folder: Path | None = None, prefix: Sequence[str] = ()
    ) -> str:
        """Run the same Python code as this user, in `shared` or another folder, as the control of an attack."""
        # Not the interpreter of the virtual environment, which other users may not be able to read.
        interpreter = os.path.realpath(sys.executable)
        return subprocess.run(
            [*prefix, interpreter, "-I", "-c", program, *map(str, arguments)],
            cwd=folder or self.shared, env={"PATH": os.environ["PATH"]}, check=True, text=True, stdout=subprocess.PIPE,
        ).stdout  # fmt: skip

    def gputrain(self, *arguments: str | Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a gputrain command as the victim. Raises subprocess.TimeoutExpired."""
        return subprocess.run(
            [sys.executable, "-P", "-c", "from tui import main; main()", *map(str, arguments)],
            cwd=self.home, env=self.environment, text=True, capture_output=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def start_gputrain(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Start a gputrain command as the victim; `perform` kills it at the latest."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from tui import main; main()", *map(str, arguments)],
            cwd=self.home, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._started.append(process)
        return process

    def kill_started(self) -> None:
        """Kill what `start_gputrain` started; the kernel kills the ranks with it."""
        for process in self._started:
            process.kill()
            process.wait()

    def gained(self, condition: bool, what: str) -> None:
        """Record what the attacker gained if the condition holds."""
        self.gains += [what] if condition else []


def perform(attack: Callable[[Stage], None]) -> None:
    """Perform an attack, print what the attacker gained, and exit."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        print("skipped: only root can become another user, through setpriv")
        sys.exit(SKIPPED_EXIT_CODE)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        # The attacker must reach the shared folder.
        root.chmod(0o711)
        stage = Stage(root)
        try:
            attack(stage)
        finally:
            stage.kill_started()
    print(f"the attacker gained: {'; '.join(stage.gains) or 'nothing'}")
    sys.exit(1 if stage.gains else 0)
