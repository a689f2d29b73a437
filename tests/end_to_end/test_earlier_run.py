"""A run folder written by an earlier version still opens, evaluates, exports and resumes.

`recordings/earlier-run/run` was stopped within its second epoch: digits on two ranks, cnn, SGD with momentum, EMA,
mixup and one DataLoader worker per rank. `resumed.json` contains the losses that the earlier version computed after a
resume.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.gputrain_command import ROOT, Gputrain, effective_events
from support.runs.trained_run import call
from support.screen.terminal import Terminal

EARLIER_RUN = ROOT / "tests" / "recordings" / "earlier-run"
LAST_STEP = 85
# CPU models differ in the order of floating-point sums.
LOSS_TOLERANCE = 1e-5


@pytest.fixture
def earlier_run(gputrain: Gputrain) -> Path:
    return copy_run(gputrain.runs)


def copy_run(runs: Path) -> Path:
    """Copy the run folder and restore `last.pt` as a hard link to the newest checkpoint; git stores no hard links."""
    run = Path(shutil.copytree(EARLIER_RUN / "run", runs / "before"))
    (run / "checkpoints" / "last.pt").unlink()
    (run / "checkpoints" / "last.pt").hardlink_to(run / "checkpoints" / f"step-{LAST_STEP:08}.pt")
    return run


def losses_after(run: Path, step: int) -> dict[int, float]:
    """Return the training loss of each later step in the journal, averaged over the ranks."""
    losses: dict[int, float] = {}
    for event in effective_events(run):
        if event["type"] == "step":
            first = event["step"] - len(event["losses"]) + 1
            losses |= {first + index: loss for index, loss in enumerate(event["losses"])}
    return {number: loss for number, loss in losses.items() if number > step}


def test_earlier_run_is_listed_as_stopped(gputrain: Gputrain, earlier_run: Path) -> None:
    [row] = json.loads(gputrain("runs", "--json").stdout)["runs"]
    assert (row["name"], row["state"], row["epoch"]) == ("before", "stopped", 1)


def test_earlier_run_shows_its_log(gputrain: Gputrain, earlier_run: Path) -> None:
    done = gputrain("logs", "before")
    assert "stopped: continue with `gputrain resume before`" in done.stdout


def test_earlier_run_evaluates_to_the_recorded_accuracy(earlier_run: Path) -> None:
    recorded = json.loads((earlier_run / "summary.json").read_text())["best_val_accuracy"]
    done = call("evaluate", earlier_run, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["top1"] == pytest.approx(recorded, abs=1e-9)


def test_earlier_run_predicts_and_exports(gputrain: Gputrain, earlier_run: Path) -> None:
    image = gputrain.folder / "image.png"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(image)
    done = call("predict", earlier_run, image)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(str(image))
    done = call("export", earlier_run, "--output", gputrain.folder / "exported")
    assert done.exit_code == 0, done.stderr
    assert len(list((gputrain.folder / "exported").iterdir())) >= 2


def test_earlier_run_is_shown_by_attach(gputrain: Gputrain, earlier_run: Path) -> None:
    terminal = Terminal(gputrain, "attach", "before")
    terminal.wait_for("before")
    terminal.wait_for("stopped")
    terminal.press("q")
    terminal.wait_for_end()


def test_earlier_run_resumes_to_recorded_losses(gputrain: Gputrain, earlier_run: Path) -> None:
    done = gputrain("resume", "before", "--headless")
    assert done.returncode == 0, done.stderr
    # Its checkpoint has no fingerprint of the data.
    assert "warning" not in done.stderr
    recorded = json.loads((EARLIER_RUN / "resumed.json").read_text())["losses"]
    losses = losses_after(earlier_run, LAST_STEP)
    assert losses == pytest.approx({int(step): loss for step, loss in recorded.items()}, abs=LOSS_TOLERANCE)
