"""Classification of image files with a trained run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.runs.folder import RunFolder
from engine.train.data.augment.batch_ops import normalize
from engine.train.data.sources.open import open_source
from engine.train.inference.evaluate import evaluate_checkpoint
from engine.train.inference.predict import find_input_files, predict
from engine.train.inference.trained_model import load_trained_model, read_trained_checkpoint
from support.gputrain_command import FinishedRun, Gputrain
from support.messages import says
from support.models.sample_images import write_sample_images
from support.runs.trained_run import DIGITS, call, saved_run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve validation images of digits, enlarged six times, some in a subfolder.

    The file names end with the label. There are also a text file, a hidden file and a truncated image.
    """
    source, folder = open_source(DIGITS), tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    pixels, labels = source.load("val", np.arange(12))
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        parent = folder / "more" if number >= 8 else folder
        Image.fromarray(np.kron(image[0], np.ones((6, 6), np.uint8))).save(parent / f"{number:02d}-{label}.png")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("not for others")
    (folder / "broken.png").write_bytes((folder / f"00-{labels[0]}.png").read_bytes()[:60])
    return folder


def test_predict_command_names_classes_of_files_and_folders(
    gputrain: Gputrain, short_run: FinishedRun, photos: Path
) -> None:
    done = gputrain(
        "predict", str(short_run.path), str(photos), str(photos / "notes.txt"), "gone.png", "--json", "--top", "3"
    )
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert (result["format"], result["run"], Path(result["checkpoint"]).name) == (1, "short", "best.pt")
    names = [Path(image["path"]).relative_to(photos).as_posix() for image in result["images"]]
    assert names == sorted(names)
    assert len(names) == 12
    correct = sum(image["classes"][0]["name"] == Path(image["path"]).stem[-1] for image in result["images"])
    assert correct >= 10
    for image in result["images"]:
        probabilities = [predicted["probability"] for predicted in image["classes"]]
        assert len(probabilities) == 3
        assert probabilities == sorted(probabilities, reverse=True)
    assert [(Path(file["path"]).name, file["code"]) for file in result["skipped"]] == [
        ("broken.png", "bad-image"),
        ("notes.txt", "bad-image"),
        ("notes.txt", "bad-image"),
        ("gone.png", "not-found"),
    ]
    broken, skipped, notes, gone = done.stderr.splitlines()
    assert broken.startswith("skipped: ") and says(broken, "bad-image", photos / "broken.png", "truncated")
    assert skipped.startswith(f"skipped: {photos}/notes.txt ") and notes.startswith(f"error: {photos}/notes.txt ")
    assert gone.startswith("error: gone.png cannot be read: No such file")


@pytest.mark.parametrize("name", ["out.csv", "out.JSON"])
def test_predict_command_writes_what_it_prints_in_the_format_of_the_ending(
    run: RunFolder, photos: Path, tmp_path: Path, name: str
) -> None:
    arguments = ("predict", run.path, photos, "--top", 2)
    printed = call(*arguments, "--json")
    done = call(*arguments, "-o", tmp_path / name)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / name}: 12 images\n")
    text = (tmp_path / name).read_text()
    if name == "out.JSON":
        assert text == printed.stdout
        return
    rows = list(csv.reader(text.splitlines()))
    assert rows[0] == ["path", "class", "probability", "class_2", "probability_2"]
    images = json.loads(printed.stdout)["images"]
    assert rows[1:] == [
        [image["path"], *(str(part) for predicted in image["classes"] for part in predicted.values())]
        for image in images
    ]


def test_probabilities_use_softmax_or_sigmoid_for_bce(tmp_path: Path) -> None:
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    for loss, function in (("cross_entropy", lambda logits: logits.softmax(1)), ("bce", torch.sigmoid)):
        trained = load_trained_model(saved_run(tmp_path / loss, loss={"name": loss}), device="cpu")
        image_format = trained.checkpoint.image_format
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (image_format.mean, image_format.std))
        logits = trained.model(normalize(images, mean, std))
        assert torch.equal(trained.probabilities(images), function(logits))


def test_predict_reads_images_one_batch_at_a_time(tmp_path: Path) -> None:
    trained = load_trained_model(saved_run(tmp_path / "a"), device="cpu")
    files = [tmp_path / f"{number:03d}.png" for number in range(130)]
    for file in files[:128]:
        Image.new("RGB", (20, 10)).save(file)
    answers = predict(trained, list(find_input_files(files)), 1)
    assert next(answers).error is None
    # Few of the next batch are read meanwhile.
    for file in files[128:]:
        Image.new("RGB", (20, 10)).save(file)
    assert [answer.error for answer in answers] == [None] * 129


def test_predict_command_escapes_control_characters(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "a", {"classes": ["\x1b[2J", "b", "c", "d", "e"]})
    Image.new("RGB", (20, 10)).save(tmp_path / "\x1b[31mred.png")
    done = call("predict", run.path, tmp_path / "\x1b[31mred.png")
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mred.png" in done.stdout


def test_predict_preprocesses_images_like_validation(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for folder in ("train/left", "train/right", "val/left", "val/right"):
        (photos / folder).mkdir(parents=True)
        samples = list(write_sample_images(photos / folder))
    data = {"dataset": "folder", "path": str(photos), "image_size": 12, "workers": 0}
    run = saved_run(tmp_path / "a", data=data)
    answers = list(predict(load_trained_model(run, device="cpu"), list(find_input_files([photos / "val"])), 1))
    assert len(answers) == 2 * len(samples)
    confusion = [[0, 0], [0, 0]]
    for answer in answers:
        true, predicted = (
            ("left", "right").index(name) for name in (answer.file.path.parent.name, answer.classes[0][0])
        )
        confusion[true][predicted] += 1
    assert evaluate_checkpoint(read_trained_checkpoint(run), device="cpu").evaluation.confusion == confusion
