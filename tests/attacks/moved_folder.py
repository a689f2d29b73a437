"""Move the folder of a run that trains, in a runs folder that several users share, and put another in its place."""

from __future__ import annotations

import time
from pathlib import Path

from attack import Stage, perform

SWAP = """
import os, pathlib
os.rename("runs/a", "runs/taken")
run = pathlib.Path("runs/a")
(run / "checkpoints").mkdir(parents=True)
run.chmod(0o777)
(run / "checkpoints").chmod(0o777)
(run / "lock").touch()
"""


def wait_for(path: Path, text: str, timeout_s: float = 60.0) -> None:
    """Wait until a file contains a text. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never contained {text}")
        time.sleep(0.1)


def attack(stage: Stage) -> None:
    runs = stage.shared / "runs"
    runs.mkdir()
    # Without the sticky bit, every user can rename every entry.
    runs.chmod(0o777)
    train = ("run", "--headless", "digits", "--model", "linear", "--ranks", "1", "--epochs", "100000")
    run = stage.start_gputrain(*train, "--name", "a")
    wait_for(runs / "a" / "events.jsonl", '"epoch"')
    stage.as_attacker(SWAP)
    wait_for(runs / "taken" / "events.jsonl", '"code":"run-changed"')
    stop = stage.gputrain("stop", "taken")
    stage.gained(stop.returncode != 0, f"cannot be stopped any more: {stop.stderr}")
    stage.gained(run.wait(60) != 3, "ended the run without a checkpoint")
    written = [path for path in (runs / "a").rglob("*") if path.name not in ("checkpoints", "lock")]
    stage.gained(bool(written), f"received files of the run: {written}")
    stage.gained(not (runs / "taken" / "checkpoints" / "last.pt").exists(), "lost the checkpoints of the run")


if __name__ == "__main__":
    perform(attack)
