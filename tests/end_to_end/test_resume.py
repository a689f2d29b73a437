"""A resumed run is bit-identical to an uninterrupted one, for every kind of interruption and at any step.

It is refused if what it was trained with has changed since its checkpoint.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from support.gputrain_command import (
    FinishedRun,
    Gputrain,
    effective_events,
    last_checkpoint_weights,
    read_events,
    shared_memory_files,
    wait_for,
)
from support.messages import says

# Everything with state or randomness: dropout, augmentation, DataLoader workers, momentum and warmup.
HARD = ["run", "--headless", "--model", "squeezenet1_1", "--epochs", "2", "--scheduler", "cosine", "--lr", "0.02"]
HARD += [
    "schedule.warmup_epochs=0.5",
    "run.log_every=4",
    "--dataset",
    "fake",
    "data.fake_train=240",
    "data.fake_val=40",
]
VARIED = ["augment.flip=true", "augment.policy=trivialaugment", "augment.brightness=0.3", "augment.hue=0.1"]
VARIED += ["augment.erasing=0.5", "augment.mixup=0.4", "augment.cutmix=1.0", "augment.mix_probability=0.8"]
VARIED += ["augment.vertical_flip=true", "augment.rotation=10", "augment.grayscale=0.2", "augment.blur=0.2"]
HARD += ["data.image_size=32", "data.batch_size=20", "augment.resized_crop=true", *VARIED]


# Iterations of the soak tests.
KILLS = int(os.environ.get("GPUTRAIN_KILLS", "20"))
STARTS = int(os.environ.get("GPUTRAIN_STARTS", "200"))


def assert_same_result(gputrain: Gputrain, run: str, other_run: str) -> None:
    assert effective_events(gputrain.runs / run) == effective_events(gputrain.runs / other_run)
    before, after = last_checkpoint_weights(gputrain.runs / run), last_checkpoint_weights(gputrain.runs / other_run)
    assert all(torch.equal(weights, after[name]) for name, weights in before.items())


@pytest.mark.nightly
def test_resume_is_bit_identical_after_kill_crash_and_stop(gputrain: Gputrain) -> None:
    common = [*HARD, "--ranks", "2", "--workers", "1"]
    whole = gputrain.start(*common, "--name", "whole")
    gputrain.inject_fault("kill", 1, 3, once=True)
    gputrain.inject_fault("kill the run", 0, 6, once=True)
    gputrain.inject_fault("stop the run", 1, 7, once=True)
    parts = [*common, "--name", "parts", "run.max_restarts=1", "checkpoint.every_steps=2", "--resume"]
    killed = gputrain(*parts)
    assert killed.returncode == -signal.SIGKILL
    assert says(killed.stderr, "rank-failed", "SIGKILL", "1 of 1")
    assert not says(killed.stderr, "resume-differs")
    assert gputrain(*parts).returncode == 3
    stopped_at = torch.load(gputrain.runs / "parts" / "checkpoints" / "last.pt", weights_only=True)
    assert (stopped_at["epoch"], 0 < stopped_at["step_in_epoch"] < 6) == (2, True)
    resumed = gputrain("resume", "parts")
    assert resumed.returncode == 0, resumed.stderr
    resumes = [event for event in read_events(gputrain.runs / "parts") if event["type"] == "run_resumed"]
    assert [event["from_step"] for event in resumes[:2]] == [
        2,
        4,
    ]
    assert whole.wait(60) == 0
    assert_same_result(gputrain, "whole", "parts")


def assert_warns_of_changes(run: Path, *changes: tuple[str, object, object]) -> None:
    """Check that the warnings of a run name these keys, with the values before and after the change."""
    warnings = [event for event in read_events(run) if event.get("code") == "resume-differs"]
    for warning, change in zip(warnings, changes, strict=True):
        assert [word for word in warning["message"].split() if word in map(str, change)] == [*map(str, change)]


def contents(run: Path) -> dict[str, bytes]:
    """Return the files that describe a run, without those of its owner."""
    names = ("config.yaml", "events.jsonl", "log.txt", "checkpoints/last.pt")
    return {name: (run / name).read_bytes() for name in names}


def damage_newest_checkpoint(run: Path) -> Path:
    newest = run / "checkpoints" / "step-00000088.pt"
    content = bytearray(newest.read_bytes())
    content[1000] ^= 255
    for path in (newest, newest.with_name("last.pt")):
        path.write_bytes(content)
    return newest


@pytest.mark.nightly
def test_resume_with_edited_config_and_damaged_checkpoint(gputrain: Gputrain, short_run: FinishedRun) -> None:
    run = Path(shutil.copytree(short_run.path, gputrain.runs / "short"))
    config, original = run / "config.yaml", short_run.path.joinpath("config.yaml").read_text()
    config.write_text(original.replace("  seed: 0\n", "  seed: 5\n"))
    before = contents(run)
    refused = gputrain("resume", "short", "run.epochs=3")
    assert refused.returncode == 2
    assert says(refused.stderr, "resume-differs", "error: run.seed: ", " 0, ", " 5")
    assert contents(run) == before
    damaged = damage_newest_checkpoint(run)
    config.write_text(config.read_text().replace("  lr: 0.1\n", "  lr: 0.05\n"))
    resumed = gputrain("resume", "short", "run.epochs=3", "run.seed=0")
    assert resumed.returncode == 0, resumed.stderr
    [resume] = (event for event in read_events(run) if event["type"] == "run_resumed")
    assert resume["from_step"] == 44
    newest, last = (event["message"] for event in read_events(run) if event.get("code") == "damaged")
    assert (damaged.name in newest, "last.pt" in last) == (True, True)
    assert_warns_of_changes(run, ("run.epochs", 2, 3), ("optim.lr", 0.1, 0.05))


# A small model without dropout: only the data is random, and a run takes seconds.
LIGHT = ["run", "--headless", "digits", "run.log_every=3", "checkpoint.every_steps=4"]
LIGHT += ["augment.crop_padding=1", *VARIED, "--batch-size", "20"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resume_is_bit_identical_after_kill_at_random_steps(gputrain: Gputrain, ranks: int, workers: int) -> None:
    common = [*LIGHT, "--epochs", "2", "--ranks", str(ranks), "--workers", str(workers)]
    assert gputrain(*common, "--name", "whole").returncode == 0
    rng = random.Random(ranks * 10 + workers)  # noqa: S311
    for step in rng.sample(range(1, 2 * (1438 // (20 * ranks))), KILLS):
        name = f"at-{step}"
        gputrain.inject_fault("kill the run", rng.randrange(ranks), step)
        assert gputrain(*common, "--name", name).returncode == -signal.SIGKILL
        del gputrain.environment["GPUTRAIN_FAULT"]
        resumed = gputrain("resume", name)
        assert resumed.returncode == 0, resumed.stderr
        assert_same_result(gputrain, "whole", name)


def start_and_kill(gputrain: Gputrain, times: int, *, resume: bool) -> None:
    """Kill the supervisor or another process of each run at a random moment during start and training."""
    rng = random.Random(0)  # noqa: S311
    before = shared_memory_files()
    for number in range(times):
        process = gputrain.start(*LIGHT, "--ranks", "2", "--workers", "1", "--name", f"run-{number}")
        time.sleep(rng.uniform(0.2, 9))
        children = [child for child in gputrain.processes() if child.pid != process.pid]
        with suppress(psutil.NoSuchProcess):
            (rng.choice(children) if children and number % 2 else psutil.Process(process.pid)).kill()
        process.communicate(timeout=60)
        wait_for(lambda: not gputrain.processes(), "the end of all processes")
        folder = gputrain.runs / f"run-{number}"
        if resume and number % 5 == 0 and (folder / "config.yaml").exists():
            done = gputrain("resume", folder.name, "run.epochs=1")
            assert done.returncode == 0, done.stderr
            assert not list(folder.rglob(".*.tmp"))
    assert shared_memory_files() <= before


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_repeated_start_and_kill_leaves_nothing(gputrain: Gputrain) -> None:
    start_and_kill(gputrain, STARTS, resume=True)
