"""Image folders as people find them: `data`, `--dry-run` and `run` see the same images and say the same of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.data.found_folders import write_camera, write_kaggle, write_kaggle_table, write_roboflow
from support.gputrain_command import Gputrain, read_events
from support.messages import says
from support.runs.trained_run import call

# More than the images, so that the batch size is not reduced, and as small as the images.
OPTIONS = ("--batch-size", "8", "--image-size", "24", "--model", "linear")


@dataclass(frozen=True)
class Found:
    """What is known of a dataset: its images by part, and the words of its warnings and of what is skipped."""

    train: int
    val: int
    test: int
    classes: int
    said: frozenset[str]


def from_data(folder: Path) -> Found:
    done = call("data", "--data-path", folder, "--image-size", 24, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    counts = [sum(row.get(part, 0) for row in result["classes"]) for part in ("train", "val", "test")]
    warnings = {line.removeprefix("warning: ") for line in done.stderr.splitlines()}
    return Found(*counts, len(result["classes"]), frozenset(warnings | set(result["skipped"])))


def from_messages(messages: list[str], **counts: int) -> Found:
    skipped = [message for message in messages if " skipped: " in message]
    names = [f"{name})" for message in skipped for name in message.partition(": ")[2].removesuffix(")").split("), ")]
    return Found(**counts, said=frozenset([*names, *(message for message in messages if message not in skipped)]))


def from_dry_run(gputrain: Gputrain, folder: Path) -> Found:
    done = gputrain("run", "--data-path", str(folder), "--dry-run", *OPTIONS)
    assert done.returncode == 0, done.stderr
    facts = {line[:19].strip(): line[19:].strip() for line in done.stdout.splitlines()}
    names = {"train": "training images", "val": "validation images", "test": "test images", "classes": "classes"}
    counts = {key: int(facts.get(name, 0)) for key, name in names.items()}
    return from_messages([line.removeprefix("warning: ") for line in done.stderr.splitlines()], **counts)


def from_run(gputrain: Gputrain, folder: Path) -> Found:
    run = ("run", "--headless", "--data-path", str(folder), "--epochs", "2", "--name", "found", *OPTIONS)
    done = gputrain(*run)
    assert done.returncode == 0, done.stderr
    events = read_events(gputrain.runs / "found")
    started = next(event for event in events if event["type"] == "run_started")
    counts = {key: started.get(f"{key}_images", 0) for key in ("train", "val", "test")}
    assert sum(event["images"] for event in events if event["type"] == "test") == counts["test"]
    messages = [event["message"] for event in events if event["type"] == "warning"]
    return from_messages(messages, classes=started["classes"], **counts)


@pytest.mark.expensive("starts two processes that import torch")
@pytest.mark.parametrize(
    ("write", "expected", "codes"),
    [
        (write_roboflow, (24, 10, 6, 2), {"images-repeated": "2 of 10 (valid/cat/copy0.jpg, "}),
        pytest.param(write_kaggle, (24, 8, 0, 2), {}, marks=pytest.mark.nightly),
        pytest.param(write_kaggle_table, (24, 8, 8, 2), {}, marks=pytest.mark.nightly),
        (write_camera, (53, 14, 0, 3), {"nested-classes": "", "similar-classes": "", "imbalanced-classes": "32 "}),
    ],
    ids=["Roboflow", "Kaggle", "table of Kaggle", "camera"],
)
def test_all_commands_agree_on_found_folder(
    gputrain: Gputrain,
    tmp_path: Path,
    write: Callable[[Path], Path],
    expected: tuple[int, ...],
    codes: dict[str, str],
) -> None:
    folder = write(tmp_path / "photos")
    data = from_data(folder)
    assert data == from_dry_run(gputrain, folder) == from_run(gputrain, folder)
    assert (data.train, data.val, data.test, data.classes) == expected
    said = "\n".join(data.said)
    assert all(says(said, code, value) for code, value in codes.items())
    skipped = {line.partition(" (")[0] for line in data.said if ": " not in line.partition(" (")[0]}
    assert (
        skipped
        == {
            write_roboflow: set(),
            write_kaggle: {"__MACOSX", "test"},
            write_kaggle_table: {"column age"},
            write_camera: {"@eaDir", "all", "lost+found", "dog/100CANON/IMG_9.HEIC", "dog/100CANON/MVI_1.MOV"},
        }[write]
    )
