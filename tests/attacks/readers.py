"""Files of a run that no run writes: of any size, pipes, terminal escapes. Whoever reads them needs bounded memory and
time, and lists the other runs."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path

from attack import Stage, perform

from engine.runs.events import RunFinished
from engine.runs.journal import to_line

# Enough for gputrain without torch.
MAX_MEMORY_BYTES = 2 << 30
# One of these commands takes 0.5 s.
MAX_SECONDS = 20.0
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
PLANT = r"""
import os
def plant(name, *, sparse=(), pipes=()):
    os.makedirs(os.path.join("runs", name))
    open(os.path.join("runs", name, "lock"), "w").close()
    for file in sparse:
        os.close(os.open(os.path.join("runs", name, file), os.O_CREAT | os.O_WRONLY))
        os.truncate(os.path.join("runs", name, file), 20 << 30)
    for file in pipes:
        os.mkfifo(os.path.join("runs", name, file))
plant("journal", sparse=["events.jsonl"])
plant("owner", sparse=["owner.json", "summary.json", "config.yaml"])
plant("pipes", pipes=["events.jsonl", "owner.json", "summary.json", "config.yaml", "log.txt"])
plant("\x1b]0;owned\x07", pipes=["events.jsonl"])
"""


def run(stage: Stage, *arguments: str | Path) -> subprocess.CompletedProcess[str] | None:
    """Run a gputrain command. None if it takes too long."""
    try:
        return stage.gputrain(*arguments, timeout_s=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def attack(stage: Stage) -> None:
    runs = stage.shared / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    for name in ("mine", "piped"):
        (runs / name).mkdir()
        (runs / name / "lock").touch()
    (runs / "mine" / "log.txt").write_text(f"loss\t0.5 {ESCAPE}\n")
    os.mkfifo(runs / "piped" / "log.txt")
    (runs / "mine" / "events.jsonl").write_text(to_line(RunFinished(state="stopped")) + "\n")
    (runs / "mine" / "config.yaml").write_text("{}")
    [row] = [row for row in json.loads(stage.gputrain("runs", "--json").stdout)["runs"] if row["name"] == "mine"]
    assert (row["state"], row["config"]["data.dataset"]) == ("stopped", "digits"), row
    assert stage.gputrain("config", runs / "mine" / "config.yaml").returncode == 0
    stage.as_attacker(PLANT)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))

    listed = run(stage, "runs")
    stage.gained(listed is None, "a list of runs that does not end")
    stage.gained(listed is not None and listed.returncode != 0, "no list of runs")
    stage.gained(listed is not None and "\nmine " not in listed.stdout, "a list of runs without the victim's")
    stage.gained(listed is not None and "\x1b" in listed.stdout + listed.stderr, "the terminal, by the list of runs")

    log = run(stage, "logs", "mine")
    stage.gained(log is None or "loss\t0.5" not in log.stdout, "a log that cannot be read")
    stage.gained(log is not None and "\x1b" in log.stdout, "the terminal, by a log")
    stage.gained(run(stage, "logs", "piped") is None, "a command that waits for a log")

    for name in ("owner", "pipes"):
        config = run(stage, "config", runs / name / "config.yaml")
        stage.gained(config is None, "a command that waits for a config")
        stage.gained(config is not None and config.returncode != 2, "a config that is read without a limit")


if __name__ == "__main__":
    perform(attack)
