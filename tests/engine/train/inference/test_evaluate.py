"""Evaluation of a trained run on its validation set and on other data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from engine.runs.folder import RunFolder
from engine.train.data.sources.open import open_source
from engine.train.inference.evaluate import evaluate_checkpoint, evaluation_config
from engine.train.inference.trained_model import load_trained_model, read_trained_checkpoint
from support.gputrain_command import FinishedRun, read_events
from support.messages import says
from support.runs.trained_run import DIGITS, call, saved_run


def test_evaluate_command_reproduces_best_epoch(short_run: FinishedRun) -> None:
    done = call("evaluate", short_run.path, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    epochs = [event for event in read_events(short_run.path) if event["type"] == "epoch"]
    best = max(epochs, key=lambda epoch: epoch["val_accuracy"])
    assert (result["split"], result["top1"]) == ("val", best["val_accuracy"])
    assert result["loss"] == pytest.approx(best["val_loss"], rel=1e-6)
    assert (
        result["images"]
        == sum(class_result["images"] for class_result in result["classes"])
        == np.sum(result["confusion"])
    )
    correct = sum(row[index] for index, row in enumerate(result["confusion"]))
    assert result["top1"] == correct / result["images"]


def test_evaluate_matches_plain_pytorch_loop(run: RunFolder) -> None:
    source, saved = open_source(DIGITS), read_trained_checkpoint(run)
    evaluation = evaluate_checkpoint(saved, device="cpu").evaluation
    trained, image_format = load_trained_model(run, device="cpu"), saved.image_format
    pixels, labels = source.load("val", np.arange(source.num_images("val")))
    images = (torch.from_numpy(pixels).float() / 255 - image_format.mean[0]) / image_format.std[0]
    hits = in_top5 = 0
    for batch, targets in DataLoader(TensorDataset(images, torch.from_numpy(labels)), 50):
        order = trained.model(batch).argsort(1, descending=True)
        hits += int((order[:, 0] == targets).sum())
        in_top5 += int((order[:, :5] == targets[:, None]).sum())
    assert evaluation.metrics.accuracy == hits / len(labels)
    assert evaluation.top5 == in_top5 / len(labels)


def digits_folder(folder: Path, names: Callable[[int], str], included: set[int]) -> Path:
    """Write the validation images of digits with the `included` labels to one folder per class."""
    pixels, labels = (source := open_source(DIGITS)).load("val", np.arange(source.num_images("val")))
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        if label in included:
            class_folder = folder / names(label)
            class_folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(class_folder / f"{number}.png")
    return folder


def test_evaluate_matches_classes_by_name(run: RunFolder, tmp_path: Path) -> None:
    folder = digits_folder(tmp_path / "some", str, {7, 3})
    saved = read_trained_checkpoint(run)
    original, renamed_data = (
        evaluate_checkpoint(saved, changes, part, "cpu")
        for changes, part in (([], "val"), (["data.dataset=folder", f"data.path={folder}"], "all"))
    )
    assert renamed_data.images_per_class == [original.images_per_class[n] if n in (3, 7) else 0 for n in range(10)]
    assert renamed_data.evaluation.per_class[3] == original.evaluation.per_class[3]
    assert renamed_data.evaluation.confusion[7] == original.evaluation.confusion[7]
    assert renamed_data.evaluation.per_class[0] is None


def test_evaluate_command_rejects_unknown_classes(run: RunFolder, tmp_path: Path) -> None:
    folder = digits_folder(tmp_path / "named", lambda label: f"digit {label}", {1, 2})
    done = call("evaluate", run.path, "data.dataset=folder", f"data.path={folder}")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: data.path: ")
    assert says(done.stderr, "bad-label", "digit 1, digit 2;", "0, 1, 2")


def test_evaluation_of_other_data_ignores_validation_shards_of_run(run: RunFolder) -> None:
    saved = read_trained_checkpoint(run)
    data = saved.config.data.model_copy(update={"dataset": "webdataset", "path": "/train.tar", "val_path": "/val.tar"})
    saved = replace(saved, config=saved.config.model_copy(update={"data": data}))
    assert evaluation_config(saved, []).data.val_path == "/val.tar"
    assert evaluation_config(saved, ["data.path=/other.tar"]).data.val_path is None
    assert evaluation_config(saved, ["data.path=/other.tar", "data.val_path=/x.tar"]).data.val_path == "/x.tar"


@pytest.mark.parametrize(
    ("path", "dataset"), [("/photos", "folder"), ("/labels.csv", "csv"), ("/val.tar", "webdataset")]
)
def test_evaluation_takes_the_dataset_that_a_path_is(run: RunFolder, path: str, dataset: str) -> None:
    saved = read_trained_checkpoint(run)
    data = saved.config.data.model_copy(update={"dataset": "csv", "path": "/train.csv"})
    saved = replace(saved, config=saved.config.model_copy(update={"data": data}))
    assert evaluation_config(saved, [f"data.path={path}"]).data.dataset == dataset


def test_model_of_float_tensors_is_evaluated_on_them_and_refuses_images(tmp_path: Path) -> None:
    code = "import torch\ndef build(part): return [(torch.eye(4).expand(7, 4, 4) * i, i % 2) for i in range(6)]\n"
    (tmp_path / "floats.py").write_text(code)
    data, model = {"dataset": "floats:build"}, {"name": "linear"}
    run = saved_run(tmp_path / "run", data=data, model=model, run={"code": str(tmp_path)})
    (tmp_path / "run" / "config.yaml").write_text(f"data: {data}\nmodel: {model}\nrun: {{code: {tmp_path}}}\n")
    assert np.sum(evaluate_checkpoint(read_trained_checkpoint(run), device="cpu").evaluation.confusion) == 6
    done = call("predict", run.path, tmp_path)
    assert done.exit_code == 2
    assert says(done.stderr, "not-supported", "best.pt", "(7 x 4 x 4)")
    inspected = call("evaluate", run.path, "--list", "mistakes")
    assert inspected.exit_code == 0 and "6 images" in inspected.stdout


VIEWING = """
import torch

def build(part):
    return [(torch.eye(4).expand(3, 4, 4) * i, i % 2) for i in range(6)]

class Net(torch.nn.Linear):
    def __init__(self, classes, channels, size):
        super().__init__(channels * size * size, classes)

    def forward(self, images):
        return super().forward(images.view(len(images), -1))
"""


def test_model_of_user_that_views_its_input_is_evaluated(tmp_path: Path) -> None:
    (tmp_path / "viewing.py").write_text(VIEWING)
    own = {"data": {"dataset": "viewing:build"}, "model": {"name": "viewing:Net"}, "run": {"code": str(tmp_path)}}
    run = saved_run(tmp_path / "run", **own)
    run.config.write_text(json.dumps(own))
    assert np.sum(evaluate_checkpoint(read_trained_checkpoint(run), device="cpu").evaluation.confusion) == 6
