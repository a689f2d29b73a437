"""Errors of user code name its own line, also if torch or another library raised them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.base.errors import UsageError
from engine.config.schema import Config
from engine.config.user_code import load_user_code
from engine.config.user_errors import UserCodeError
from engine.train.data.augment.augmentation import Augmentation
from engine.train.data.sources.base import ImageFormat
from engine.train.data.sources.user_dataset import open_user_dataset
from engine.train.distributed.failures import find_cause, rank_failure
from engine.train.loop.tasks.table import build_task
from engine.train.models.factory import build_model, check_model
from support.messages import has_problem, raises_problem

MODULE = "owned"
SOURCE = """
import ast
import io
import torch
from PIL import Image
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(3, classes)

    def forward(self, x):
        return self.head(x)  # forward

def build(classes):
    return nn.Linear(classes, -1)  # build

def parses_text(classes):
    return ast.literal_eval("(")  # parse

def loss(logits, labels):
    return nn.functional.cross_entropy(logits, logits[0])  # loss

class Data(torch.utils.data.TensorDataset):
    classes = ("a", "b")
    def __init__(self, part):
        super().__init__(torch.zeros(4))
    def __getitem__(self, index):
        return Image.open(io.BytesIO(b"no image"))  # item

def data(part):
    return torch.load("/nowhere/data.pt")  # dataset

def transform(image):
    return nn.functional.conv2d(image, image)  # transform

def uses_package(classes):
    import sys
    sys.path.append(__file__.replace("owned.py", ".venv/lib/python3/site-packages"))
    from inner_package import fail
    return fail()  # package
"""
FORMAT = ImageFormat(8, 3, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which is that of the user code, with an environment inside it."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    installed = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "inner_package.py").write_text("def fail():\n    raise KeyError('inner')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own_line(code: Path, comment: str) -> str:
    number = next(number for number, line in enumerate(SOURCE.splitlines(), 1) if line.endswith(f"# {comment}"))
    return f"({code}/{MODULE}.py, line {number})"


def config(key: str, name: str) -> Config:
    section, _, field = key.partition(".")
    return Config.model_validate({section: {field: f"{MODULE}:{name}"}})


def provoke(key: str, name: str) -> None:
    """Use the user code of a key as a run does."""
    used = config(key, name)
    if key == "model.name":
        check_model(build_model(used, 3, 2, 8), used, FORMAT, 8, 2)
    elif key == "loss.name":
        _ = build_task(used, ("a", "b"), torch.device("cpu")).loss
    elif key == "data.dataset":
        open_user_dataset(used.data, used.run)
    else:
        images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
        Augmentation(used, FORMAT).apply_image_transforms(images, 1, np.array([0]))


@pytest.mark.parametrize(
    ("key", "name", "comment"),
    [
        ("model.name", "Net", "forward"),
        ("model.name", "uses_package", "package"),
        ("loss.name", "loss", "loss"),
        ("data.dataset", "Data", "item"),
        ("data.dataset", "data", "dataset"),
        ("augment.transform", "transform", "transform"),
    ],
)
def test_user_code_error_names_own_line_instead_of_library(key: str, name: str, comment: str, code: Path) -> None:
    with pytest.raises((UsageError, UserCodeError)) as caught:
        provoke(key, name)
    message = str(caught.value)
    assert own_line(code, comment) in message and "\n" not in message
    assert "site-packages" not in message


def test_rank_failure_names_own_line(code: Path) -> None:
    used = config("model.name", "Net")
    try:
        build_model(used, 3, 2, 8)(torch.zeros(1, 3, 8, 8))
    except RuntimeError as error:
        failure = rank_failure(0, "cpu", error, used)
        assert "mat1 and mat2 shapes cannot be multiplied" in failure.cause
        assert failure.cause.endswith(own_line(code, "forward"))
        # The working folder is user code only for a config that names some.
        assert find_cause(error, Config()).reason.endswith("3x2)")


@pytest.mark.parametrize(
    ("package", "statement"),
    [
        ("engine/blocks.py", "from engine.blocks import block"),
        ("engine/__init__.py", "from engine import block"),
        ("engine.py", "import engine\nengine.block()"),
    ],
)
def test_own_package_named_like_that_of_gputrain_is_reported(package: str, statement: str, tmp_path: Path) -> None:
    import tui  # noqa: F401 - as in the command line, which imports user code for a summary

    (tmp_path / package).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / package).write_text("def block(): ...\n")
    (tmp_path / "imports_it.py").write_text(f"{statement}\ndef build(): ...\n")
    name = package.partition("/")[0].removesuffix(".py")
    with raises_problem("user-code-failed", "model.name", f"`import {name}`", tmp_path / package.split("/")[0]):
        load_user_code("model.name", "imports_it:build", str(tmp_path))


def test_engine_module_of_torchvision_layout_is_refused_with_file_to_rename(tmp_path: Path) -> None:
    # As in references/detection of torchvision.
    (tmp_path / "utils.py").write_text("size = 64\n")
    (tmp_path / "engine.py").write_text("import utils\ndef train_one_epoch(): ...\n")
    (tmp_path / "train.py").write_text("import utils\nfrom engine import train_one_epoch\ndef build(): ...\n")
    place = f"({tmp_path / 'train.py'}, line 2)"
    with pytest.raises(UsageError) as refused:
        load_user_code("model.name", "train:build", str(tmp_path))
    (problem,) = refused.value.problems
    assert has_problem([problem], "user-code-failed", "model.name", tmp_path / "engine.py", place)
    assert "ImportError" not in str(problem)


@pytest.mark.parametrize(
    ("package", "statement"),
    [
        ("other/blocks.py", "from engine.blocks import block"),
        ("engine/blocks.py", "import surely_not_installed"),
    ],
)
def test_other_import_errors_do_not_blame_own_package(package: str, statement: str, tmp_path: Path) -> None:
    (tmp_path / package).parent.mkdir()
    (tmp_path / package).write_text("def block(): ...\n")
    (tmp_path / "imports_other.py").write_text(f"{statement}\ndef build(): ...\n")
    with pytest.raises(UsageError) as caught:
        load_user_code("model.name", "imports_other:build", str(tmp_path))
    assert "`import" not in str(caught.value)
