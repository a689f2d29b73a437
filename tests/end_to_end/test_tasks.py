"""From a CSV file to an ONNX file by two commands, for the tasks whose labels are no classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from engine.config.loader import resolve_config
from engine.config.task_section import TaskName
from engine.config.tasks import TASK_FACTS
from engine.runs.evaluations import read_evaluations
from engine.train.data.sources.open import open_source
from support.gputrain_command import Gputrain
from support.messages import says
from support.runs.trained_run import call


def write_digits(folder: Path, header: str, of_digit: dict[int, str]) -> Path:
    source = open_source(resolve_config("digits").config)
    lines = [header]
    for number, (image, label) in enumerate(zip(source.images["train"], source.labels["train"][:200], strict=False)):
        Image.fromarray(image[0]).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{of_digit[int(label)]}")
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder / "labels.csv"


@pytest.mark.expensive("a process trains, then the model is traced and run by onnxruntime")
@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_csv_becomes_onnx_file_that_predicts_the_same(task: TaskName, tmp_path: Path, gputrain: Gputrain) -> None:
    facts = TASK_FACTS[task]
    labels = {digit: ";".join(["odd"] * (digit % 2) + ["small"] * (digit < 5)) for digit in range(10)}
    numbers = {digit: f"{100 * digit},{-digit}" for digit in range(10)}
    table = (
        write_digits(tmp_path, "image,label", labels)
        if task == "multilabel"
        else write_digits(tmp_path, "image,hundreds,minus", numbers)
    )
    small = ("data.image_size=8", "data.channels=1", "model.name=linear", "device.gpus=cpu", "run.epochs=2")
    trained = gputrain("run", str(table), "--task", task, *small, "--name", "csv", "--headless")
    assert trained.returncode == 0, trained.stderr + trained.stdout
    run = gputrain.folder / "runs" / "csv"
    assert call("export", run, "--format", "onnx").exit_code == 0
    images = [tmp_path / f"{number}.png" for number in range(8)]
    predicted = json.loads(call("predict", run, *images, "--json").stdout)["images"]
    evaluated = json.loads(call("evaluate", run, "--json").stdout)

    description = json.loads((run / "export" / "model.json").read_text())
    session = onnxruntime.InferenceSession(str(run / "export" / "model.onnx"))
    metadata = session.get_modelmeta().custom_metadata_map
    names, exported = json.loads(metadata["classes"]), json.loads(metadata["task"])
    assert description["task"] == exported
    [outputs] = session.run(None, {"images": np.stack([np.asarray(Image.open(path))[None] for path in images])})
    for row, image in zip(outputs, predicted, strict=True):
        if task == "multilabel":
            found = {
                name: value for name, value, low in zip(names, row, exported["thresholds"], strict=True) if value >= low
            }
            assert {label["name"]: label["probability"] for label in image["labels"]} == pytest.approx(found, abs=1e-6)
        else:
            found = dict(zip(names, row, strict=True))
            assert {number["name"]: number["value"] for number in image["numbers"]} == pytest.approx(found, rel=1e-4)
    assert description["val_metrics"] == pytest.approx(evaluated["metrics"], rel=1e-4)
    assert evaluated["top1"] is None and evaluated["confusion"] == []
    stored = read_evaluations(run / "evaluation.json")
    assert stored.task == task and len(stored.best.per_class) == 2
    assert set(evaluated[facts.outputs][0]) == {"name", "images", facts.per_output, *stored.best.details}
    assert call("report", run, "-o", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert f"<h2>{facts.outputs.capitalize()}</h2>" in page
    assert page.count("Predicted numbers upwards") == (2 if facts.outputs == "numbers" else 0)
    worst = json.loads(call("evaluate", run, "--list", "mistakes", "-n", 40, "--json").stdout)["lists"]["mistakes"]
    assert np.mean([image["loss"] for image in worst]) == pytest.approx(evaluated["loss"], rel=1e-3)
    assert worst == sorted(worst, key=lambda image: -image["loss"])
    refused = call("evaluate", run, "--list", "uncertain")
    assert refused.exit_code == 2 and says(refused.stderr, "not-supported", "--list", facts.outputs)
