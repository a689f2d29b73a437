"""The command of the README: two ranks on the CPU train on the digits, and the run folder documents the run."""

from __future__ import annotations

import json
import re

import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.gputrain_command import FinishedRun, read_events, without_timings


def test_digits_run_folder_has_documented_files(digits_run: FinishedRun) -> None:
    names = {path.name for path in digits_run.path.iterdir()}
    expected = "config.yaml events.jsonl summary.json log.txt checkpoints tensorboard owner.json lock .lock control"
    assert names == {*expected.split(), "class_indices.json", "evaluation.json"}
    newest = [f"step-{22 * epoch:08d}.pt" for epoch in (13, 14, 15)]
    assert sorted(path.name for path in (digits_run.path / "checkpoints").iterdir()) == ["best.pt", "last.pt", *newest]


def test_run_json_prints_journal_only(digits_run: FinishedRun) -> None:
    journal = (digits_run.path / "events.jsonl").read_text()
    # Each line begins with the format, which the journal has in `run_started` only.
    assert re.sub(r'^\{"format":1,', "{", digits_run.process.stdout, flags=re.M) == journal.replace('"format":1,', "")
    assert all(line.startswith('{"format":1,') for line in digits_run.process.stdout.splitlines())
    assert digits_run.process.stderr == ""


def test_digits_run_journal_has_plan_steps_and_epochs(digits_run: FinishedRun) -> None:
    events = read_events(digits_run.path)
    # On a host with GPUs, a warning says that they are hidden.
    started = next(event for event in events if event["type"] != "warning")
    assert started["type"] == "run_started"
    assert (started["world_size"], started["global_batch"], started["classes"]) == (2, 64, 10)
    assert started["train_images"] + started["val_images"] == 1797
    steps = [event for event in events if event["type"] == "step"]
    assert sum(len(event["losses"]) for event in steps) == started["steps_per_epoch"] * 15
    assert [event["step"] for event in steps[:3]] == [10, 20, 30]
    assert [event["epoch"] for event in events if event["type"] == "epoch"] == list(range(1, 16))
    assert events[-1] == events[-1] | {"type": "run_finished", "state": "finished"}


def test_run_is_reproducible_with_same_seed(short_run: FinishedRun, repeated_short_run: FinishedRun) -> None:
    assert repeated_short_run.process.returncode == 0, repeated_short_run.process.stdout
    assert without_timings(read_events(repeated_short_run.path)) == without_timings(read_events(short_run.path))


def test_digits_run_writes_tensorboard_scalars(digits_run: FinishedRun) -> None:
    epochs = [event for event in read_events(digits_run.path) if event["type"] == "epoch"]
    for series, tags in (
        ("train", {"loss", "accuracy", "learning_rate", "gradient_norm"}),
        ("val", {"loss", "accuracy", "top5"}),
    ):
        scalars = EventAccumulator(str(digits_run.path / "tensorboard" / series)).Reload()
        assert set(scalars.Tags()["scalars"]) == tags
        accuracies = scalars.Scalars("accuracy")
        assert [point.step for point in accuracies] == list(range(1, 16))
        assert abs(accuracies[-1].value - epochs[-1][f"{series}_accuracy"]) < 1e-6


def test_run_prints_plain_lines_without_terminal(short_run: FinishedRun) -> None:
    assert short_run.process.stdout == ""
    lines = short_run.process.stderr.splitlines()
    if lines[0].startswith("warning: CUDA_VISIBLE_DEVICES='' hides "):
        del lines[0]
    assert lines[0] == f"short: starting in {short_run.path}"
    assert lines[1].startswith("short: 1 rank on the CPU, started by fork, global batch size 32")
    # A slow machine also prints how far an epoch is.
    epochs = [line.split()[1] for line in lines if line.startswith("epoch") and "train loss" in line]
    assert epochs == ["1", "2"]
    summary = json.loads((short_run.path / "summary.json").read_text())
    found = [line.partition(" (data wait ")[0] for line in lines[2:-2] if not line.startswith("epoch")]
    assert found == ([summary["bottleneck"]["message"]] if summary["bottleneck"] else [])
    assert lines[-2].startswith("finished: best val acc 0.")
    assert lines[-1] == f"2 epochs on the CPU, {summary['seconds_per_epoch']:.1f} s per epoch"
    assert summary["devices"] == "the CPU"


def test_run_prints_progress_on_terminal(repeated_short_run: FinishedRun) -> None:
    output = repeated_short_run.process.stdout
    assert re.search(r"epoch   1  step \d+/\d+  [\d,]+ images/s", output)
    assert re.search(r"epoch   2 +train loss", output)
    assert "finished" in output


def test_digits_run_summary_agrees_with_journal(digits_run: FinishedRun) -> None:
    summary = json.loads((digits_run.path / "summary.json").read_text())
    epochs = [event for event in read_events(digits_run.path) if event["type"] == "epoch"]
    best = max(epochs, key=lambda epoch: epoch["val_accuracy"])
    assert summary["epochs"] == 15
    assert summary["train_loss"] == epochs[-1]["train_loss"]
    assert summary["val_accuracy"] == epochs[-1]["val_accuracy"]
    assert (summary["best_epoch"], summary["best_val_accuracy"]) == (best["epoch"], best["val_accuracy"])
    assert summary["images_per_second"] > 0
    assert 0 < summary["seconds"] < 200


def test_digits_run_checkpoint_holds_resume_state(digits_run: FinishedRun) -> None:
    state = torch.load(digits_run.path / "checkpoints" / "last.pt", weights_only=True)
    assert state["format"] == 1
    assert (state["epoch"], state["step_in_epoch"], state["step"]) == (16, 0, 22 * 15)
    assert state["config"] == yaml.safe_load((digits_run.path / "config.yaml").read_text())
    assert len(state["ranks"]) == 2
    assert set(state["ranks"][1]) == {"rng", "loss_sum", "counts", "unreported"}
    assert set(state["ranks"][1]["rng"]) == {"python", "numpy", "torch", "cuda"}
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in state["model"])
