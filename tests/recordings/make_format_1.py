"""Write one file of each stored format to `tests/recordings/format-1`, by the commands and functions of gputrain.

The run is stopped within its second epoch: digits on two ranks, with EMA, momentum, mixup and one DataLoader worker per
rank. `resumed.json` holds the losses after a resume. `tests/end_to_end/test_format_1.py` reads all of it.

Caches are not kept: one of another format is made again. Rerun this before the first release only:
`python tests/recordings/make_format_1.py`. A later format gets a folder of its own beside this one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from engine.runs.control import send_request
from engine.runs.folder import RunFolder
from engine.sync.state import RemoteState, state_file, write_state
from tui.form.model import Form, save_last_form
from tui.list_settings import ListSettings, save_list_settings
from tui.palette import PALETTES
from tui.theme import save_palette

TARGET = Path(__file__).with_name("format-1")
GPUTRAIN = str(Path(sys.executable).with_name("gputrain"))
NAME = "kept"
REMOTE_RUN = "0123456789abcdef"
ON_CPU = ("--gpus", "cpu", "--model", "linear")
KEPT = (
    *("digits", "--name", NAME, *ON_CPU, "--ranks", "2", "--headless", "run.log_every=5"),
    *("--epochs", "3", "--batch-size", "4", "data.pipeline=stream", "data.workers=1", "checkpoint.keep=1"),
    *("model.ema=0.9", "optim.momentum=0.9", "augment.mixup=0.2", "schedule.warmup_epochs=1", "run.early_stop=2"),
)
# Host names are in several files; a sample shows none of this machine.
SKIPPED = ("tensorboard", "lock", "*.lock", "*.json.gz", "notify.log")


def gputrain(*arguments: str) -> None:
    """Run a command to its end."""
    subprocess.run([GPUTRAIN, *arguments], check=True, stdout=subprocess.DEVNULL)


def events(run: RunFolder) -> list[dict[str, Any]]:
    """Return the events in the journal of a live run."""
    lines = run.journal.read_text().splitlines(keepends=True) if run.journal.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_epoch(run: RunFolder) -> None:
    while not any(event["type"] == "epoch" for event in events(run)):
        time.sleep(0.005)


def losses_after(run: RunFolder, step: int) -> dict[int, float]:
    """Return the training loss of each later step of a resumed run."""
    lines = [event for event in events(run) if event["type"] == "step" and event["step"] > step]
    numbers = {event["step"] - len(event["losses"]) + 1 + index: loss for event in lines
               for index, loss in enumerate(event["losses"])}  # fmt: skip
    return {number: loss for number, loss in numbers.items() if number > step}


def make_stopped_run(runs: Path) -> RunFolder:
    """Train to the middle of the second epoch; a run that was faster starts again."""
    run = RunFolder(runs / NAME)
    while True:
        process = subprocess.Popen([GPUTRAIN, "run", *KEPT], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_epoch(run)
        process.terminate()
        if process.wait() == 3 and sum(event["type"] == "epoch" for event in events(run)) == 1:
            return run
        shutil.rmtree(run.path)


def make_profile(runs: Path, reservations: Path) -> Path:
    """Start a run that waits for the CPU, profile it, and keep its reservation; return the folder of its profiles."""
    gputrain("run", "digits", "--name", "queued", *ON_CPU, "--queue", "--detach", "--epochs", "10000")
    run = RunFolder(runs / "queued")
    wait_for_epoch(run)
    (entry,) = reservations.glob("gputrain-*/*.json")
    shutil.copy(entry, TARGET / "reservation.json")
    gputrain("runs", "profile", "queued", "--steps", "2")
    gputrain("stop", "queued")
    return run.path


def write_images(folder: Path) -> Path:
    for name in ("cat", "dog"):
        for number in range(2):
            path = folder / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (80 * number, 90, 200)).save(path)
    return folder


def make_all(work: Path) -> None:
    runs, reservations = work / "runs", work / "reservations"
    other = make_profile(runs, reservations)
    run = make_stopped_run(runs)
    [step] = [event["step"] for event in events(run) if event["type"] == "checkpoint"][-1:]
    shutil.copytree(run.path, work / "resumed" / NAME)
    gputrain("resume", NAME, "--runs-dir", str(work / "resumed"), "--headless")
    gputrain("runs", "tag", NAME, "+first", "+small")
    gputrain("runs", "note", NAME, "stopped within its second epoch")
    gputrain("evaluate", NAME, "--list", "mistakes", "-n", "1")
    gputrain("export", NAME)
    for name in ("profile", "queue.json"):
        shutil.move(other / name, run.path / name)
    send_request(run.control, "profile", steps=7)
    state = RemoteState(token=REMOTE_RUN, sent_step=step)
    write_state(state_file(run, "mlflow"), "http://tracking:5000 gputrain", state)
    gputrain("sweep", "digits", "optim.lr=0.05,0.1", "model.name=linear", "run.epochs=1", "--sampler", "grid",
             "--name", "kept-sweep", "--pruner", "none", "--gpus", "cpu")  # fmt: skip
    save_last_form(Form("digits", {"run.epochs": "7"}))
    save_palette(PALETTES[1])
    save_list_settings(ListSettings(columns=("state", "lr"), sort_key="lr", reverse=True))

    ignored = shutil.ignore_patterns(*SKIPPED, "preprocess.py", "README.md", "last.pt")
    shutil.copytree(run.path, TARGET / NAME, ignore=ignored)
    shutil.copytree(runs / "kept-sweep", TARGET / "kept-sweep", ignore=ignored)
    shutil.copytree(work / "state" / "gputrain", TARGET / "state")
    losses = losses_after(RunFolder(work / "resumed" / NAME), step)
    (TARGET / "resumed.json").write_text(json.dumps({"step": step, "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        places = {"XDG_CONFIG_HOME": "config", "XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state"}
        places |= {"GPUTRAIN_RUNS": "runs", "GPUTRAIN_RESERVATIONS": "reservations"}
        for place in places.values():
            Path(folder, place).mkdir()
        os.environ |= {variable: str(Path(folder, place)) for variable, place in places.items()}
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        make_all(Path(folder))
