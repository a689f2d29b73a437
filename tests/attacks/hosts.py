"""Hosts that answer with terminal escapes, endless lines, values of other types, or whose names are options of ssh.
Whoever watches them needs bounded memory and time, sees the other hosts, and runs nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from attack import Stage, perform

sys.path.append(str(Path(__file__).parent.parent))
from support.servers.ssh_stand_in import run_line, snapshot_line
from tui.cli.console import json_line

# Enough for gputrain without torch.
MAX_MEMORY_BYTES = 2 << 30
# A command waits 15 s for hosts that say nothing.
MAX_SECONDS = 30.0
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
SSH = """\
#!/bin/sh
[ "$1" = -G ] && exit
while [ "$1" != -- ]; do shift; done
case $2 in
words) cat escapes >&2; exit 255;;
endless) echo gputrain-starts; exec cat /dev/zero;;
flood) echo gputrain-starts; exec yes "$(cat good)";;
words-flood) exec cat /dev/zero >&2;;
silent) exec sleep 100;;
esac
echo gputrain-starts
cat "$2-runs" >&2
while cat "$2"; do sleep 2; done
"""


def gputrain(stage: Stage, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Run a gputrain command. None if it takes too long."""
    try:
        return stage.gputrain(*arguments, timeout_s=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def attack(stage: Stage) -> None:
    proxy = "-oProxyCommand=touch owned"
    for name in (proxy, "x -oProxyCommand=touch owned", "$(touch owned)"):
        refused = gputrain(stage, "gpus", f"--hosts={name}")
        stage.gained(refused is None or refused.returncode != 2, "a name of a host that is an option or a command")
    stage.gained((stage.home / "owned").exists(), "a command on this host")

    folder = stage.home / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    stage.environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    listed = json_line({"listed": 1})
    good_runs = f"{run_line('mine')}\n{listed}\n"
    trial = run_line("trial").replace('"sweep":""', '"sweep":"/etc"').replace('"folder":"/runs/trial"', '"folder":""')
    trials = "\n".join([trial, trial.replace('"name":"trial"', '"name":"trial-2"'), run_line("../outside")])
    answers = {
        "good": (snapshot_line("good"), good_runs),
        "escapes": (snapshot_line(ESCAPE), f"{run_line(f'x{ESCAPE}')}\n{ESCAPE}\n{listed}\n"),
        "raw": (f'{{"format":1,"time":1,"host":"{ESCAPE}"}}', ESCAPE),
        "paths": (snapshot_line("paths"), f"{trials}\n{listed}\n"),
        "types": (
            '{"format":1,"time":[],"gpus":{"a":1}}',
            f'{{"format":1,"name":3}}\n{{"format":1,"gone":{{}}}}\n{listed}\n',
        ),
        "deep": ("[" * 500_000, f'{{"format":1,"gone":{"[" * 50_000}\n{listed}\n'),
    }
    for name, (gpus, runs) in answers.items():
        (stage.home / name).write_text(f"{gpus}\n")
        (stage.home / f"{name}-runs").write_text(runs)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))

    hosts = "good,escapes,raw,paths,types,deep,words,endless,flood,words-flood"
    for command in (["gpus"], ["gpus", "--json"], ["runs"], ["runs", "--json"]):
        shown = gputrain(stage, *command, "--hosts", hosts if len(command) > 1 else f"{hosts},silent")
        name = " ".join(command)
        stage.gained(shown is None, f"a command that does not end: {name}")
        if shown is None:
            continue
        stage.gained(shown.returncode != 0, f"no {name}: {shown.stderr[-300:]}")
        stage.gained("\x1b" in shown.stdout + shown.stderr, f"the terminal, by {name}")
        stage.gained("Traceback" in shown.stderr, f"a traceback of {name}")
        stage.gained("outside" in shown.stdout, f"a run with a path as its name, by {name}")
        expected = "good:mine" if command[0] == "runs" else "good"
        stage.gained(expected not in shown.stdout, f"{name} without the other hosts")


if __name__ == "__main__":
    perform(attack)
