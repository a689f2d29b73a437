"""The presets of `configs/`: each resolves, has a row in the table, and has the values of its source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config.loader import presets, resolve_config
from engine.train.data.sources.open import expected_input_format
from engine.train.models.summary import build_untrained_model

CONFIGS = Path(__file__).parents[3] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
PUBLISHED = ("imagenet-rn50-16", "imagenet-rn50", "cifar10-resnet18", "fashion-mnist")


@pytest.fixture(autouse=True)
def without_own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_preset_resolves_without_keys_that_have_no_effect(name: str) -> None:
    assert presets()[name] == CONFIGS / f"{name}.yaml"
    assert presets()[name].read_text().startswith("# ")
    resolved = resolve_config(name, allow_missing=True)
    assert {problem.location for problem in resolved.missing} <= {"data.path"}
    assert resolved.no_effect == ()


def test_every_preset_has_a_row_in_the_table() -> None:
    lines = (CONFIGS / "README.md").read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| `")]
    assert sorted(row[0].strip(" `") for row in rows) == NAMES
    assert all(len(row) == 5 and row[4].strip() for row in rows)
    for name in PUBLISHED:
        assert "Source: " in (CONFIGS / f"{name}.yaml").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("name", PUBLISHED)
def test_model_of_preset_accepts_its_images(name: str) -> None:
    config = resolve_config(name, ["data.path=/photos"]).config
    image_format = expected_input_format(config)
    classes = 1000 if name.startswith("imagenet") else 10
    with torch.device("meta"):
        model = build_untrained_model(config, image_format.channels, classes, image_format.size).eval()
    for size in (*image_format.train_sizes, image_format.val_size):
        assert model(torch.empty(1, image_format.channels, size, size, device="meta")).shape == (1, classes)
