"""Plant run folders in a shared runs folder: one that executes code, one with links, one that claims to be finished."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from attack import ATTACKER_UID, Stage, perform

from engine.base.codec import replace
from engine.config.loader import resolve_config
from engine.config.schema import as_dict
from engine.config.yaml_io import to_yaml
from engine.runs.events import RunFinished
from engine.runs.journal import to_line

sys.path.append(str(Path(__file__).parent.parent))

from support.runs.event_factories import make_epoch, make_run_started

# Planted files that hold a newer start than every run of the victim.
PLANT = """
import json, os, pathlib, sys
marker, victim_file, name, config, journal, mode = sys.argv[1:]
run = pathlib.Path("runs", name)
(run / "checkpoints").mkdir(parents=True)
run.chmod(int(mode, 8))
(run / "lock").touch()
(run / "lock").chmod(int(mode, 8) & 0o666)
pathlib.Path("evil.py").write_text(f"open({marker!r}, 'w')\\ndef build(**options): raise SystemExit\\n")
(run / "config.yaml").write_text(config)
if victim_file:
    os.symlink(victim_file, run / "log.txt")
    os.symlink(victim_file, run / "events.jsonl")
else:
    (run / "events.jsonl").write_text(journal)
(run / "owner.json").write_text(json.dumps({"format": 1, "host": "h", "pid": 1, "user": "victim", "heartbeat": None}))
"""
TRAIN = ("run", "--headless", "digits", "--model", "linear", "--ranks", "1", "--epochs", "1")


def attack(stage: Stage) -> None:
    runs = stage.shared / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    marker, victim_file = stage.shared / "executed", stage.home / "notes.txt"
    victim_file.write_text("notes\n")
    check_control(stage)
    stage.as_attacker(PLANT, marker, "", "zz", evil_config("zz", stage.shared), journal("zz", "stopped"), "777")
    stage.as_attacker(PLANT, marker, victim_file, "linked", evil_config("linked", stage.shared), "", "777")
    stage.as_attacker(PLANT, marker, "", "job2", finished_config(), journal("job2", "finished"), "777")

    mine = stage.gputrain(*TRAIN, "--name", "mine")
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
    resumed = stage.gputrain(*TRAIN, "--name", "job2", "--resume")
    stage.gained(resumed.returncode != 2, f"ended --resume with exit code {resumed.returncode}")
    stage.gained(f"uid {ATTACKER_UID}" not in resumed.stderr, f"is refused for another reason: {resumed.stderr}")
    squatted = stage.gputrain(*TRAIN, "--name", "linked", "--resume")
    stage.gained(squatted.returncode != 2, f"resumed a folder with links, exit code {squatted.returncode}")
    stage.gained("link events.jsonl" not in squatted.stderr, f"is refused for another reason: {squatted.stderr}")
    listed = json.loads(stage.gputrain("runs", "--json").stdout)["runs"]
    foreign = {row["name"] for row in listed if row["foreign"]}
    stage.gained(foreign != {"zz", "linked", "job2"}, f"hid its runs among the victim's: {foreign}")
    stage.gained(marker.exists(), "executed code as the victim")
    stage.gained(victim_file.read_text() != "notes\n", "wrote to a file of the victim")
    stage.gained(any((runs / "job2" / "checkpoints").iterdir()), "got a checkpoint")


def check_control(stage: Stage) -> None:
    """Raise AssertionError unless the same folders have their effect if the victim owns them."""
    folder, shared_runs = stage.home / "control", stage.environment["GPUTRAIN_RUNS"]
    (folder / "runs").mkdir(parents=True)
    stage.environment["GPUTRAIN_RUNS"] = str(folder / "runs")
    marker = folder / "executed"
    stage.as_victim(PLANT, marker, "", "job2", finished_config(), journal("job2", "finished"), "755", folder=folder)
    stage.as_victim(PLANT, marker, "", "zz", evil_config("zz", folder), journal("zz", "stopped"), "755", folder=folder)
    rows = json.loads(stage.gputrain("runs", "--json").stdout)["runs"]
    found = {(row["name"], row["state"], row["epochs"], row["val_accuracy"], row["foreign"]) for row in rows}
    assert found == {("zz", "stopped", 1, 0.5, None), ("job2", "finished", 1, 0.5, None)}, found
    last = stage.gputrain("logs", "last")
    assert "zz has no log yet" in last.stderr, last.stderr
    resumed = stage.gputrain(*TRAIN, "--name", "job2", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert not marker.exists()
    stage.gputrain("resume", "zz", "--headless")
    assert marker.exists()
    stage.environment["GPUTRAIN_RUNS"] = shared_runs


def evil_config(name: str, folder: Path) -> str:
    """Return a config whose model is code of the attacker."""
    return f"run: {{code: {folder}, name: {name}}}\nmodel: {{name: 'evil:build'}}\ndata: {{dataset: digits}}\n"


def finished_config() -> str:
    """Return the config that the command `TRAIN` would store."""
    return to_yaml(as_dict(resolve_config("digits", ["model.name=linear", "device.ranks=1", "run.epochs=1"]).config))


def journal(name: str, state: str) -> str:
    """Return the journal of a run that trained one epoch and ended. It began in the future, so it is the newest run."""
    events = (
        replace(make_run_started(time.time() + 3600), name=name, epochs=1),
        make_epoch(1),
        RunFinished(state=state),
    )
    return "".join(to_line(event) + "\n" for event in events)


if __name__ == "__main__":
    perform(attack)
