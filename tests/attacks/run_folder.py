"""Plant run folders in a shared runs folder: one that executes code, one with links, one that claims to be finished."""

from __future__ import annotations

import json

from attack import ATTACKER_UID, Stage, perform

# Planted files that hold a newer start than every run of the victim.
PLANT = """
import json, os, pathlib, sys, time
marker, victim_file, name, state = sys.argv[1:]
run = pathlib.Path("runs", name)
(run / "checkpoints").mkdir(parents=True)
run.chmod(0o777)
(run / "lock").touch()
(run / "lock").chmod(0o666)
pathlib.Path("evil.py").write_text(f"open({marker!r}, 'w')\\ndef build(**options): raise SystemExit\\n")
(run / "config.yaml").write_text(
    f"run: {{code: {os.getcwd()}, name: {name}}}\\nmodel: {{name: 'evil:build'}}\\ndata: {{dataset: digits}}\\n"
)
counts = ("world_size", "epochs", "global_batch", "steps_per_epoch", "train_images", "val_images", "classes")
started = {"type": "run_started", "time": time.time(), "name": name, "host": "h", "devices": ["cpu"], "backend": "gloo"}
started |= {"parameters": 1, "trainable": 1, **dict.fromkeys(counts, 1)}
epoch = {"type": "epoch", "time": time.time(), "epoch": 1, "step": 1, "train_loss": 0.0, "train_accuracy": 1.0,
         "val_loss": 0.0, "val_accuracy": 1.0, "lr": 0.1, "seconds": 1.0, "images_per_second": 1.0}
finished = {"type": "run_finished", "time": time.time(), "state": state, "message": ""}
if victim_file:
    os.symlink(victim_file, run / "log.txt")
    os.symlink(victim_file, run / "events.jsonl")
else:
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\\n" for event in (started, epoch, finished)))
(run / "owner.json").write_text(json.dumps({"format": 1, "host": "h", "pid": 1, "user": "victim", "heartbeat": None}))
future = time.time() + 3600
os.utime(run / "config.yaml", (future, future))
"""


def attack(stage: Stage) -> None:
    runs = stage.shared / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    marker, victim_file = stage.shared / "executed", stage.home / "notes.txt"
    victim_file.write_text("notes\n")
    stage.as_attacker(PLANT, marker, "", "zz", "stopped")
    stage.as_attacker(PLANT, marker, victim_file, "linked", "stopped")
    stage.as_attacker(PLANT, marker, "", "job2", "finished")

    train = ("run", "--headless", "digits", "--model", "linear", "--ranks", "1", "--epochs", "1")
    mine = stage.gputrain(*train, "--name", "mine")
    stage.gained(mine.returncode != 0, f"stopped the victim's own run: {mine.stderr}")
    stage.gained(bool((runs / "mine").stat().st_mode & 0o077), "can read the victim's run")

    last = stage.gputrain("logs", "last")
    stage.gained("1/1" not in last.stdout and "epoch" not in last.stdout, "is what `last` means")
    refusals = {
        ("predict", "zz", victim_file): f"uid {ATTACKER_UID}",
        ("resume", "zz", "--headless"): f"uid {ATTACKER_UID}",
        ("resume", runs / "linked"): "link events.jsonl",
    }
    for command, reason in refusals.items():
        refused = stage.gputrain(*command)
        stage.gained(refused.returncode != 2 or reason not in refused.stderr, f"was used by {command[0]}")
    resumed = stage.gputrain(*train, "--name", "job2", "--resume")
    stage.gained(resumed.returncode != 2, f"ended --resume with exit code {resumed.returncode}")
    squatted = stage.gputrain(*train, "--name", "linked", "--resume")
    stage.gained(squatted.returncode != 2, f"resumed a folder with links, exit code {squatted.returncode}")
    listed = json.loads(stage.gputrain("runs", "--json").stdout)["runs"]
    foreign = {row["name"] for row in listed if row.get("foreign")}
    stage.gained(foreign != {"zz", "linked", "job2"}, f"hid its runs among the victim's: {foreign}")
    stage.gained(marker.exists(), "executed code as the victim")
    stage.gained(victim_file.read_text() != "notes\n", "wrote to a file of the victim")
    stage.gained(any((runs / "job2" / "checkpoints").iterdir()), "got a checkpoint")


if __name__ == "__main__":
    perform(attack)
