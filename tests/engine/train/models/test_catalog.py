"""The catalog lists models without importing torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.base import libraries
from engine.base.codec import write_record
from engine.base.errors import UsageError, not_installed
from engine.config.schema import Config
from engine.config.training_sections import BUILTIN_MODELS, ModelConfig
from engine.train.models import catalog
from engine.train.models.catalog import (
    filter_models,
    read_listing,
    resolve_model_source,
)
from engine.train.models.catalog_process import list_timm
from engine.train.models.factory import build_model
from engine.train.models.pretrained_input import find_pretrained_input
from support.messages import has_problem, raises_problem


@pytest.fixture(scope="module", autouse=True)
def cache() -> Path:
    """The cache folder that all tests share, with the models of both libraries."""
    for source in ("torchvision", "timm"):
        read_listing(source)
    return Path(os.environ["XDG_CACHE_HOME"])


@pytest.fixture
def forbid_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def run_in_place_of_the_catalog(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    (folder / "catalog_stub.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(catalog, "_HELPER_MODULE", "catalog_stub")


def test_read_listing_match_torchvision_and_timm() -> None:
    import timm
    from torchvision import models

    ours = {model.name: model for model in read_listing("torchvision").models}
    assert list(ours) == models.list_models(module=models)
    default = models.ResNet50_Weights.DEFAULT
    resnet50 = ours["resnet50"]
    assert resnet50.weights == (default.name, "IMAGENET1K_V1")
    assert (resnet50.parameters, resnet50.top1) == (25_557_032, default.meta["_metrics"]["ImageNet-1K"]["acc@1"])

    theirs = {model.name: model for model in read_listing("timm").models}
    assert list(theirs) == timm.list_models()
    assert theirs["resnet18"].weights[0] == timm.get_pretrained_cfg("resnet18").tag
    assert {f"resnet18.{tag}" for tag in theirs["resnet18"].weights} == set(timm.list_pretrained("resnet18"))


def test_input_of_torchvision_weights_is_that_of_their_transforms() -> None:
    from torchvision import models

    for name in models.list_models(module=models):
        found = find_pretrained_input(ModelConfig(name=name, source="torchvision", weights="pretrained"))
        if not len(models.get_model_weights(name)):
            assert found is None
            continue
        default = models.get_model_weights(name)["DEFAULT"]
        transforms = default.transforms()
        assert found is not None
        assert found.weights == str(default)
        assert [found.val_crop, found.val_resize] == [*transforms.crop_size, *transforms.resize_size]
        assert (found.interpolation, found.fit) == (transforms.interpolation.value, "crop")
        assert found.resize_for(found.val_crop) == found.val_resize
        if name not in ("googlenet", "inception_v3"):
            assert [*found.mean, *found.std] == [*transforms.mean, *transforms.std]


def test_input_of_timm_weights_is_that_of_their_data_config(cache: Path, forbid_processes: None) -> None:
    import timm
    from timm.data import resolve_data_config, transforms_factory

    # In this process, which has imported timm: another one takes seconds.
    listing = cache / "gputrain" / f"models-timm-{libraries.installed_version('timm')}.json"
    write_record(listing, list_timm())
    names = [
        "resnet50",
        "resnet50.tv_in1k",
        "convnext_tiny.in12k_ft_in1k",
        "dm_nfnet_f0.dm_in1k",
        "vit_base_patch16_224",
    ]
    for name in names:
        found = find_pretrained_input(ModelConfig(name=name, source="timm", weights="pretrained"))
        cfg = vars(timm.get_pretrained_cfg(name))
        training, test = (
            resolve_data_config(pretrained_cfg=cfg),
            resolve_data_config(pretrained_cfg=cfg, use_test_size=True),
        )
        assert found is not None
        assert (3, found.image_size, found.image_size) == training["input_size"]
        assert (3, found.val_crop, found.val_crop) == test["input_size"]
        resize, crop, *_ = transforms_factory.transforms_imagenet_eval(
            found.val_crop, crop_pct=test["crop_pct"], crop_mode=test["crop_mode"]
        ).transforms
        assert resize.size == ((found.val_resize,) * 2 if found.fit == "squash" else found.val_resize)
        assert crop.size == (found.val_crop, found.val_crop)
        assert (found.interpolation, found.mean, found.std) == (test["interpolation"], test["mean"], test["std"])


def test_read_listing_rewrite_damaged_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "gputrain" / f"models-torchvision-{libraries.installed_version('torchvision')}.json"
    path.parent.mkdir()
    model: dict[str, object] = {"source": "torchvision", "name": "resnet18", "weights": []}
    models = [{"name": "resnet18"}, model | {"name": 5}, model | {"top1": "69"}, model | {"parameters": [5]}]
    files = [{"format": 1, "models": value, "inputs": {}} for value in (*([model] for model in models), 3)]
    for damaged in (*map(json.dumps, files), '{"format": 2, "models": [], "inputs": {}}', '{"models": []}', "{"):
        path.write_text(damaged)
        with monkeypatch.context() as patched:
            run_in_place_of_the_catalog(
                tmp_path, patched, "def main(parent): parent.send({'value': {'models': [], 'inputs': {}}})"
            )
            assert read_listing("torchvision").models == ()
        assert json.loads(path.read_text()) == {"format": 1, "models": [], "inputs": {}}


@pytest.mark.parametrize(
    "model",
    [
        *({"name": name} for name in BUILTIN_MODELS),
        {"name": "cnn", "source": "builtin"},
        {"name": "mycode.nets:build"},
    ],
    ids=str,
)
def test_resolve_model_source_starts_no_process_for_builtin_and_user_models(
    model: dict[str, str], forbid_processes: None
) -> None:
    resolve_model_source(ModelConfig(**model))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("resnet50", "auto"),
        ("resnet50", "torchvision"),
        ("resnet50", "timm"),
        ("resnet50d", "auto"),
        ("resnet50.a1_in1k", "timm"),
    ],
)
def test_resolve_model_source_accepts_model_of_its_source(name: str, source: Any) -> None:
    resolve_model_source(ModelConfig(name=name, source=source))


@pytest.mark.parametrize(
    ("name", "source", "values"),
    [
        ("resnet500", "auto", ["resnet50?"]),
        ("resnet-18-small", "builtin", [" builtin ", "resnet18-small?"]),
        ("resnet50.a1_in2k", "timm", [" timm ", "resnet50.a1_in1k?"]),
    ],
)
def test_resolve_model_source_suggests_nearest_model(name: str, source: Any, values: list[str]) -> None:
    with raises_problem("unknown-value", "model.name", f"'{name}'", *values):
        resolve_model_source(ModelConfig(name=name, source=source))


def test_resolve_model_source_without_timm_names_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = libraries.installed_version
    monkeypatch.setattr(libraries, "installed_version", lambda name: None if name == "timm" else installed(name))
    with raises_problem("not-installed", "model.source", "pip install timm"):
        resolve_model_source(ModelConfig(name="resnet50d", source="timm"))
    with raises_problem("unknown-value", "model.name", "'resnet50d'", f"({not_installed('timm')})"):
        resolve_model_source(ModelConfig(name="resnet50d"))


def test_resolve_model_source_reports_broken_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run_in_place_of_the_catalog(tmp_path, monkeypatch, "raise ImportError('no libjpeg')")
    with raises_problem("library-failed", "model.source", "torchvision", "ImportError: no libjpeg"):
        resolve_model_source(ModelConfig(name="resnet50"))


@pytest.fixture
def break_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace timm in this process and its children by version 9.9.9, which runs a program when it is imported."""

    def replace(program: str) -> None:
        (tmp_path / "timm").mkdir()
        (tmp_path / "timm" / "__init__.py").write_text(program)
        (tmp_path / "timm-9.9.9.dist-info").mkdir()
        (tmp_path / "timm-9.9.9.dist-info" / "METADATA").write_text("Name: timm\nVersion: 9.9.9\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            monkeypatch.delitem(sys.modules, name)

    return replace


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import surely_not_installed", "ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("print('{}')\nraise ImportError('no _C')", "ImportError: no _C"),
    ],
)
def test_broken_timm_is_reported_in_one_sentence(
    program: str, cause: str, break_timm: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    break_timm(program)
    values = ("timm 9.9.9 ", f"{cause};", "`pip install --force-reinstall timm`", "torchvision")
    with pytest.raises(UsageError) as caught:
        read_listing("timm")
    problems = caught.value.problems
    # Its models may have been listed before it broke.
    with pytest.raises(UsageError) as caught:
        build_model(Config(model=ModelConfig(name="resnet10t", source="timm")), 3, 10, 32)
    for [problem] in (problems, caught.value.problems):
        assert has_problem([problem], "library-failed", "model.source", *values) and "\n" not in str(problem)
    assert capfd.readouterr().out == ""


def test_matching_filters_by_substring_or_pattern() -> None:
    models = read_listing("torchvision").models
    assert [model.name for model in filter_models(models, "VIT_B")] == ["vit_b_16", "vit_b_32"]
    assert [model.name for model in filter_models(models, "resnet?8")] == ["resnet18"]
    assert [model.name for model in filter_models(models, "*_[hl]_*")] == ["vit_h_14", "vit_l_16", "vit_l_32"]
    assert filter_models(models, None) == list(models)
