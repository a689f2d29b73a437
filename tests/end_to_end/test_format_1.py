"""The kept files of format 1 are still read: `recordings/format-1` has one of each stored format.

The run was stopped within its second epoch: digits on two ranks, a linear model, SGD with momentum, EMA, mixup and one
DataLoader worker per rank. It still opens, evaluates, exports and resumes. `resumed.json` contains the losses that the
gputrain that wrote it computed after a resume.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.base.locks import take_write_lock
from engine.gpus.reservation_reader import read_reservations
from engine.jobs.queue.state import QueueStage, read_queue_state
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.settings import read_settings
from engine.jobs.sweeps.status import SweepReader
from engine.runs.claim import read_claim
from engine.runs.control import consume_requests
from engine.runs.evaluations import read_evaluations
from engine.runs.folder import RunFolder
from engine.runs.inspection import read_inspection
from engine.runs.labels import read_labels
from engine.runs.profile_file import newest_profile
from engine.train.loop.checkpoint import check_content, load_checkpoint
from support.gputrain_command import ROOT, Gputrain, effective_events
from support.runs.trained_run import call
from tui.form.model import load_last_form
from tui.terminal.palette import PALETTES
from tui.terminal.theme import initial_palette

FORMAT_1 = ROOT / "tests" / "recordings" / "format-1"
RESUMED = json.loads((FORMAT_1 / "resumed.json").read_text())
LAST_STEP: int = RESUMED["step"]
# CPU models differ in the order of floating-point sums.
LOSS_TOLERANCE = 1e-5


@pytest.fixture
def kept_run(gputrain: Gputrain) -> Path:
    return copy_run(gputrain.runs)


def copy_run(runs: Path) -> Path:
    """Copy the run folder and restore `last.pt` as a hard link to the newest checkpoint; git stores no hard links."""
    run = Path(shutil.copytree(FORMAT_1 / "kept", runs / "kept"))
    (run / "checkpoints" / "last.pt").hardlink_to(run / "checkpoints" / f"step-{LAST_STEP:08}.pt")
    (run / "lock").touch()
    return run


def losses_after(run: Path, step: int) -> dict[int, float]:
    """Return the training loss of each later step in the journal, averaged over the ranks."""
    losses: dict[int, float] = {}
    for event in effective_events(run):
        if event["type"] == "step":
            first = event["step"] - len(event["losses"]) + 1
            losses |= {first + index: loss for index, loss in enumerate(event["losses"])}
    return {number: loss for number, loss in losses.items() if number > step}


def test_kept_run_is_listed_as_stopped(gputrain: Gputrain, kept_run: Path) -> None:
    [row] = json.loads(gputrain("runs", "--json").stdout)["runs"]
    assert (row["name"], row["state"], row["epochs"]) == ("kept", "stopped", 1)


def test_kept_run_evaluates_to_the_recorded_accuracy(kept_run: Path) -> None:
    recorded = json.loads((kept_run / "summary.json").read_text())["best_val_accuracy"]
    done = call("evaluate", kept_run, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["top1"] == pytest.approx(recorded, abs=1e-9)


def test_kept_run_predicts_and_replaces_its_export(gputrain: Gputrain, kept_run: Path) -> None:
    image = gputrain.folder / "image.png"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(image)
    done = call("predict", kept_run, image)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(str(image))
    kept = json.loads((kept_run / "export" / "model.json").read_text())
    done = call("export", kept_run)
    assert done.exit_code == 0, done.stderr
    exported = json.loads((kept_run / "export" / "model.json").read_text())
    assert exported["weights_sha256"] == kept["weights_sha256"]


def test_kept_run_resumes_to_recorded_losses(gputrain: Gputrain, kept_run: Path) -> None:
    done = gputrain("resume", "kept", "--headless")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    losses = losses_after(kept_run, LAST_STEP)
    assert losses == pytest.approx({int(step): loss for step, loss in RESUMED["losses"].items()}, abs=LOSS_TOLERANCE)


def test_kept_checkpoint_has_its_content() -> None:
    state = load_checkpoint(FORMAT_1 / "kept" / "checkpoints" / f"step-{LAST_STEP:08}.pt")
    check_content(state)
    assert (state["format"], state["step"], state["epoch"], state["global_batch"]) == (1, LAST_STEP, 2, 8)
    assert (len(state["ranks"]), state["images"]) == (2, [1438, 359])
    assert state["step_in_epoch"] == LAST_STEP - 179
    assert set(state["ema"]) == set(state["model"]) == {"1.weight", "1.bias"}


def test_kept_files_of_run_are_read(tmp_path: Path) -> None:
    run = RunFolder(copy_run(tmp_path))
    claim = read_claim(run.owner)
    assert claim is not None and (claim.heartbeat, len(claim.token) > 20) == (None, True)
    labels = read_labels(run)
    assert (labels.tags, labels.note) == (("first", "small"), "stopped within its second epoch")
    queue = read_queue_state(run)
    assert queue is not None and (queue.stage, queue.priority, queue.held) == (QueueStage.STARTED, 0, False)
    [request] = consume_requests(run.control)
    assert (request.request, request.steps) == ("profile", 7)
    evaluations = read_evaluations(run.evaluation)
    assert (len(evaluations.classes), evaluations.last.epoch, evaluations.best.read_counts().sum()) == (10, 1, 359)
    inspection = read_inspection(run)
    assert inspection is not None and (len(inspection), inspection.info.part) == (359, "val")
    profile = newest_profile(run)
    assert profile is not None and (profile[1].steps, profile[1].device_type) == (2, "cpu")


def test_kept_sweep_is_read() -> None:
    folder = SweepFolder(FORMAT_1 / "kept-sweep")
    settings = read_settings(folder.settings)
    assert (settings.space, settings.sampler) == ({"optim.lr": "0.05,0.1"}, "grid")
    status = SweepReader(folder).poll()
    assert [(trial.run, trial.state) for trial in status.trials] == [
        ("kept-sweep-000", "complete"),
        ("kept-sweep-001", "complete"),
    ]


def test_kept_reservation_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    folder = tmp_path / f"gputrain-{os.getuid()}"
    folder.mkdir(0o755)
    shutil.copy(FORMAT_1 / "reservation.json", folder / "1-2.json")
    with (folder / "1-2.lock").open("w") as lock:
        assert take_write_lock(lock.fileno())
        [found] = read_reservations(remove_stale=False)
    assert (found.run, found.gpus, found.visible, found.share) == ("queued", ("cpu",), ("cpu",), 1)


def test_kept_choices_of_user_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    shutil.copytree(FORMAT_1 / "state", tmp_path / "gputrain")
    assert load_last_form().overrides == {"run.epochs": "7"}
    assert initial_palette() == PALETTES[1]
