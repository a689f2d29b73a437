"""The examples of `engine/OWN_CODE.md` train as they are, and the page lists every key that names user code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.config.loader import resolve_config
from engine.config.schema import sections
from engine.config.user_code import user_code_names
from engine.train.data.sources.open import open_source
from support.runs.in_process import train_in_process
from tui.cli.models import name_model

PAGE = Path(__file__).parents[1] / "engine" / "OWN_CODE.md"
ALL_SEVEN = (
    "data.dataset=mycode:Squares",
    "model.name=mycode:Net",
    "loss.name=mycode:focal",
    "augment.transform=mycode:invert",
    "optim.name=mycode:Sign",
    "schedule.name=mycode:halves",
    "eval.metrics=mycode:calibration",
)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The examples as one module; returns the config key of its folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mycode", raising=False)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "mycode.py").write_text("\n\n".join(examples))
    return f"run.code={tmp_path}"


@pytest.mark.parametrize("mixup", [0.0, 0.2])
def test_examples_train_together(code: str, mixup: float, tmp_path: Path) -> None:
    recipe = ("run.epochs=1", "optim.lr=0.001", "schedule.warmup_epochs=0", f"augment.mixup={mixup}")
    [epoch] = train_in_process(tmp_path / "run", code, *ALL_SEVEN, *recipe)
    assert epoch.val_accuracy is not None and epoch.lr == 0.001
    assert [*epoch.metrics] == ["confidence", "overconfidence"]


def test_folder_of_torchvision_is_a_dataset(code: str, tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(np.zeros((9, 12), np.uint8)).save(tmp_path / part / name / "1.png")
    config = resolve_config(
        None, ["data.dataset=mycode:photos", f"data.path={tmp_path}", "data.image_size=8", code]
    ).config
    source = open_source(config)
    assert source.classes == ("cat", "dog") and source.num_images("val") == 2


def test_page_and_descriptions_cover_each_key_of_user_code(code: str) -> None:
    keys = {*user_code_names(resolve_config(None, [code, *ALL_SEVEN]).config)}
    assert {*re.findall(r"^\| \[\w+\]\(#\w+\) \| `([\w.]+)`", PAGE.read_text(), re.M)} == keys
    for key in keys:
        section, _, name = key.partition(".")
        assert "engine/OWN_CODE.md" in str(sections()[section].model_fields[name].description), key


def test_models_show_takes_user_code_for_a_model() -> None:
    assert name_model(["mycode:Net", "data.dataset=digits"]) == ["model.name=mycode:Net", "data.dataset=digits"]
