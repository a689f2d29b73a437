"""Plant commands and processes in run folders and swap working folders; imitate the marker and forge the metrics of a
run.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from attack import Stage, perform

PLANT = """
import json, os, pathlib, sys, time
name, command, mode = sys.argv[1:4]
run = pathlib.Path("runs", name)
run.mkdir()
run.chmod(int(mode, 8))
(run / "lock").touch()
(run / "config.yaml").write_text("device: {gpus: cpu}\\n")
(run / "command.json").write_text(command)
started = {"type": "command_started", "time": time.time(), "format": 1, "name": name, "host": os.uname().nodename,
    "command": "python train.py", "cwd": "/", "pid": 1, "run_id": sys.argv[4], "devices": ["cpu"], "ranks": [],
    "parameters": {}, "versions": {}}
(run / "events.jsonl").write_text(json.dumps(started) + "\\n")
(run / "owner.json").write_text(json.dumps({"format": 1, "host": "h", "pid": 1, "user": "victim", "heartbeat": None}))
"""
# A program of the attacker with a marker in its environment.
IMPOSTOR = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "60"], env={"GPUTRAIN_RUN_ID": sys.argv[1], "PATH": os.environ["PATH"]},
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
print(child.pid)
"""
SWAP = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.rename(folder.with_name("old"))
folder.mkdir()
folder.chmod(0o777)
(folder / "train.sh").write_text(f"#!/bin/sh\\ntouch {sys.argv[2]}\\n")
(folder / "train.sh").chmod(0o755)
"""
FORGE = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1e308, "planted": 7}\\n')
os.symlink(sys.argv[2], folder / "trainer_state.json")
os.mkfifo(folder / "log.jsonl")
with open(folder / "huge.jsonl", "wb") as file:
    file.truncate(5 << 30)
"""
RUN = ("run", "--headless", "--gpus", "cpu")


def attack(stage: Stage) -> None:
    runs = stage.shared / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    plant_commands(stage, runs)
    swap_working_folder(stage)
    forge_marker(stage)
    forge_metrics(stage)


def command(marker: Path, **values: object) -> str:
    """Return a `command.json` that creates a file."""
    fields: dict[str, object] = {"argv": ["touch", str(marker)], "cwd": "/", "cwd_inode": Path("/").stat().st_ino}
    environment = {"PATH": os.environ["PATH"], "LD_PRELOAD": "/evil.so"}
    return json.dumps({"format": 1, "environment": environment} | fields | values)


def plant_commands(stage: Stage, runs: Path) -> None:
    marker = stage.shared / "executed"
    stage.as_attacker(PLANT, "planted", command(marker), "777", "planted-1")
    for flags in ((), ("--trust-owner",)):
        refused = stage.gputrain("resume", "planted", "--headless", *flags)
        stage.gained(refused.returncode not in (2, 125), f"was resumed with {flags}: {refused.returncode}")
        stage.gained(not refused.stderr.startswith(("error:", "command:")), f"is refused otherwise: {refused.stderr}")
    stage.gained("LD_PRELOAD=/evil.so" not in refused.stderr, f"hid what its command runs: {refused.stderr}")
    stage.gained(f"touch {marker}" not in refused.stderr, f"hid its command: {refused.stderr}")
    stage.gputrain("queue", "resume", "planted")
    stage.gputrain(*RUN, "--resume", "--name", "planted", "--", "true")
    stage.gained(marker.exists(), "executed code as the victim")

    # The victim's own folder, in which everybody can write.
    stage.as_victim(PLANT, "open", command(marker), "777", "open-1")
    refused = stage.gputrain("resume", "open", "--headless", "--trust-owner")
    stage.gained(refused.returncode == 0 or marker.exists(), "executed code through a folder that all can write")
    # The control: the same folder of the victim alone, and what the flag trusts.
    stage.as_victim(PLANT, "mine", command(marker), "700", "mine-1")
    assert stage.gputrain("resume", "mine", "--headless").returncode == 0 and marker.exists()
    marker.unlink()
    stage.gputrain("resume", "planted", "--headless", "--trust-owner", "--trust-code")
    assert marker.exists()

    stage.as_victim(PLANT, "link", "", "700", "link-1")
    (runs / "link" / "command.json").unlink()
    (runs / "link" / "command.json").symlink_to(runs / "mine" / "command.json")
    refused = stage.gputrain("resume", "link", "--headless", "--trust-code", "--trust-owner")
    stage.gained(refused.returncode == 0, "ran a command.json that is a link")


def swap_working_folder(stage: Stage) -> None:
    """The folder of a command is in a folder of the attacker, who renames it while the command waits."""
    marker = stage.shared / "swapped"
    stage.as_attacker("import os; os.mkdir('open'); os.chmod('open', 0o777)")
    folder = stage.shared / "open" / "work"
    folder.mkdir()
    (folder / "train.sh").write_text("#!/bin/sh\nexit 3\n")
    (folder / "train.sh").chmod(0o755)
    first = stage.gputrain(*RUN, "--name", "swapped", "--cwd", folder, "--", "./train.sh")
    assert first.returncode == 3, first.stderr
    stage.start_gputrain(*RUN, "--name", "blocker", "--", "sleep", "60")
    assert wait_for((stage.shared / "runs" / "blocker" / "events.jsonl").exists)
    later = ("--name", "later", "--cwd", folder, "--after", "blocker:any", "--", "./train.sh")
    waiting = stage.start_gputrain(*RUN, *later)
    journal = stage.shared / "runs" / "later" / "events.jsonl"
    assert wait_for(lambda: journal.exists() and "waiting" in journal.read_text())
    stage.as_attacker(SWAP, folder, marker)
    resumed = stage.gputrain("resume", "swapped", "--headless")
    stage.gained(resumed.returncode == 0, "was used in place of the working folder")
    stage.gained("another folder" not in resumed.stderr, f"is refused otherwise: {resumed.stderr}")
    stage.gputrain("stop", "blocker")
    stage.gained(waiting.wait(timeout=60) == 0, "was used by a command that had waited")
    stage.gained(marker.exists(), "executed code in a folder that it had swapped")


def forge_marker(stage: Stage) -> None:
    """A process of the attacker has the marker of the victim's run."""
    stage.start_gputrain(*RUN, "--name", "long", "--", "sleep", "60")
    journal = stage.shared / "runs" / "long" / "events.jsonl"
    assert wait_for(lambda: journal.exists() and "command_started" in journal.read_text())
    event = next(json.loads(line) for line in journal.read_text().splitlines() if "command_started" in line)
    pid = int(stage.as_attacker(IMPOSTOR, event["run_id"]))
    stage.gputrain("stop", "long")
    stage.gained(not Path(f"/proc/{pid}").exists(), "made the victim end a process that is not its own")
    subprocess.run(["kill", str(pid)], check=False)


def forge_metrics(stage: Stage) -> None:
    """Files with metrics in the working folder of the victim's run, which others can write."""
    folder = stage.shared / "common"
    folder.mkdir()
    folder.chmod(0o777)
    secret = stage.home / "secret.json"
    secret.write_text('{"log_history": [{"step": 1, "secret": 5}]}')
    # The command waits for the files of the attacker.
    script = "touch ready; while ! test -e huge.jsonl; do sleep 0.1; done; sleep 2.5; echo 'step 1 loss=0.5'"
    run = stage.start_gputrain(*RUN, "--name", "common", "--cwd", folder, "--", "sh", "-c", script)
    assert wait_for((folder / "ready").exists)
    stage.as_attacker(FORGE, folder, secret)
    stage.gained(run.wait(timeout=60) != 0, "ended the victim's run by its files")
    record = json.loads((stage.shared / "runs" / "common" / "summary.json").read_text())
    stage.gained("secret" in record["metrics"], "showed a file of the victim")
    stage.gained("planted" in record["metrics"], "forged a metric")
    stage.gained(record["metrics"].get("loss") != 0.5, f"forged the loss: {record['metrics']}")


def wait_for(condition: Callable[[], bool]) -> bool:
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


if __name__ == "__main__":
    perform(attack)
