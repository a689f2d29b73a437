"""Layers, parameters and multiply-adds, compared with published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchvision import models
from typer.testing import CliRunner

from engine.config.data_sections import DataConfig
from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.train.models.summary import ModelSummary, input_spec, summarize_model
from tui.cli.main import app
from tui.screens.tables.models import layer_lines


def summary_of(name: str, size: int = 224, classes: int = 1000, batch_size: int = 1, **model: Any) -> ModelSummary:
    data = DataConfig(dataset="fake", image_size=size, num_classes=classes)
    return summarize_model(Config(model=ModelConfig(name=name, **model), data=data), batch_size)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 224),
        ("mobilenet_v3_small", 224),
        ("vit_b_16", 224),
        ("inception_v3", 299),
    ],
)
def test_summary_multiply_adds_match_torchvision(name: str, size: int) -> None:
    summary = summary_of(name, size)
    meta = models.get_model_weights(name).DEFAULT.meta  # type: ignore[attr-defined]
    assert summary.multiply_adds / 1e9 == pytest.approx(meta["_ops"], abs=0.00051)
    if name != "inception_v3":
        # The published count includes the auxiliary head, which is not built here.
        assert summary.parameters == meta["num_params"]


def test_summary_layers_form_tree_with_totals() -> None:
    layers = {layer.path: layer for layer in summary_of("resnet18").layers}
    assert layers["layer1.0.conv1"].depth == 3
    assert layers["layer1"].output == (1, 64, 56, 56)
    for path in ("", "layer1", "layer1.0"):
        below = [layer for layer in layers.values() if layer.path and layer.path.rpartition(".")[0] == path]
        assert layers[path].parameters == sum(layer.parameters for layer in below)
        assert layers[path].multiply_adds == sum(layer.multiply_adds for layer in below)


@pytest.mark.parametrize(
    ("data", "classes"),
    [
        ({"dataset": "digits"}, 10),
        ({"dataset": "fake", "num_classes": 7}, 7),
        ({"dataset": "cifar10", "path": "/nowhere"}, 10),
        ({"dataset": "cifar100", "path": "/nowhere"}, 100),
        ({"dataset": "folder", "path": "/nowhere", "num_classes": 3}, 3),
    ],
    ids=str,
)
def test_images_of_takes_class_count_from_dataset(data: dict[str, Any], classes: int) -> None:
    assert input_spec(Config(data=DataConfig(**data)))[1] == classes


@pytest.mark.parametrize(
    ("arguments", "images", "classes"),
    [
        (["--model", "cnn"], [1, 3, 224, 224], 1000),
        (["--model", "cnn", "data.channels=1", "data.num_classes=7", "data.image_size=32"], [1, 1, 32, 32], 7),
        (["digits", "--model", "cnn"], [1, 1, 8, 8], 10),
        (["cnn"], [1, 3, 224, 224], 1000),
        (["cnn", "--dataset", "digits"], [1, 1, 8, 8], 10),
    ],
)
def test_summary_command_without_dataset_counts_imagenet_input(
    arguments: list[str], images: list[int], classes: int
) -> None:
    result = json.loads(CliRunner().invoke(app, ["models", "show", *arguments, "--json"]).stdout)
    assert (result["images"], result["classes"]) == (images, classes)


def test_summary_command_names_the_nearest_model_and_keeps_the_advice_for_files(tmp_path: Path) -> None:
    for word, hint in (("resnet5", "resnet50?"), (str(tmp_path / "my.yaml"), "presets: ")):
        result = CliRunner().invoke(app, ["models", "show", word])
        assert result.exit_code == 2 and result.stderr.startswith(f"error: {word}: ") and hint in result.stderr


def test_summary_applies_freeze() -> None:
    summary = summary_of("resnet18", 64, 10, freeze="backbone")
    assert (summary.parameters, summary.trainable) == (11_181_642, 5_130)
    lines = [line.split() for line in layer_lines(summary, 1)]
    trains_column = {line[0]: line[-1] for line in lines}
    assert (trains_column["layer"], trains_column["resnet18"], trains_column["layer4"], trains_column["fc"]) == (
        "trains",
        "partly",
        "frozen",
        "yes",
    )
