"""Initial weights from files and libraries."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

from engine.config.loader import validate_config
from engine.config.schema import Config
from engine.runs.checkpoint_files import CHECKPOINT_KEYS
from engine.train.loop.checkpoint import save_checkpoint
from engine.train.models.factory import build_model
from engine.train.models.transfer import (
    LoadedWeights,
    copy_matching_weights,
    download_lock,
    load_weights,
    pretrained_weights,
)
from engine.train.models.weights_file import weights_problems
from support.messages import has_problem, raises_problem

FIVE = ("a", "b", "c", "d", "e")
SMALL = {"name": "resnet18-small", "options": {"width": 4}}


def config(**model: Any) -> Config:
    return Config.model_validate({"model": SMALL | model})


def build(channels: int = 1, classes: int = 5, **model: Any) -> nn.Module:
    return build_model(config(**model), channels, classes, 32)


def load(model: nn.Module, size: int = 32, classes: tuple[str, ...] = FIVE, **keys: Any) -> LoadedWeights:
    loaded = load_weights(model, config(**keys), size, classes)
    assert loaded is not None
    return loaded


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    own = model.state_dict()
    return all(torch.equal(own[name], value) for name, value in state.items())


def checkpoint(path: Path, model: dict[str, Tensor], **more: Any) -> Path:
    """A checkpoint written like that of a run."""
    state = dict.fromkeys(CHECKPOINT_KEYS) | {"step": 1, "model": model, "classes": list(FIVE)} | more
    return save_checkpoint(state, path, best=False, keep=1)


# Weights of files


@pytest.mark.parametrize(
    ("nest", "prefix"),
    [
        *((nest, "") for nest in (None, "model", "state_dict", "model_state_dict", "ema")),
        *((None, prefix) for prefix in ("module.", "_orig_mod.", "module._orig_mod.")),
    ],
)
def test_load_weights_reads_nested_and_prefixed_state_dict(tmp_path: Path, nest: str | None, prefix: str) -> None:
    source_weights = build().state_dict()
    state: dict[str, Any] = {f"{prefix}{name}": value for name, value in source_weights.items()}
    torch.save(state if nest is None else {nest: state, "epoch": 3}, tmp_path / "w.pth")
    model = build()
    loaded = load(model, weights=str(tmp_path / "w.pth"))
    assert same(model, source_weights)
    # Without the counters of BatchNorm.
    num_entries = sum(not name.endswith("_tracked") for name in source_weights)
    assert (loaded.num_loaded, loaded.num_entries, loaded.skipped) == (num_entries, num_entries, ())


def test_load_weights_prefers_ema_of_checkpoint(tmp_path: Path) -> None:
    last, averaged = build().state_dict(), build().state_dict()
    model = build()
    load(model, weights=str(checkpoint(tmp_path, last, ema=None)))
    assert same(model, last)
    load(model, weights=str(checkpoint(tmp_path, last, ema=averaged)))
    assert same(model, averaged)


def test_load_weights_skips_classifier_of_other_classes(tmp_path: Path) -> None:
    weights = build().state_dict()
    path = str(checkpoint(tmp_path, weights))
    loaded = load(build(), weights=path, classes=("v", "w", "x", "y", "z"))
    assert loaded.skipped == ("fc.weight (of other classes)", "fc.bias (of other classes)")
    assert load(build(), weights=path).skipped == ()


def test_load_weights_refuses_those_that_fit_less_than_min_match_of_the_model(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"options": {}, "weights": str(tmp_path / "w.pt")}
    torch.save(models.resnet18().state_dict(), tmp_path / "w.pt")
    resnet50 = build(3, 10, name="resnet50", options={})
    with raises_problem(
        "conflict", "model.weights", tmp_path / "w.pt", "77 of the 267 entries of resnet50", "layer1.0.conv1.weight",
        "model.min_match=0.28",
    ):  # fmt: skip
        load(resnet50, name="resnet50", **keys)
    assert load(resnet50, name="resnet50", min_match=0.28, **keys).num_loaded == 77
    # The other head is 2 of 102 entries.
    resnet18 = build(3, name="resnet18", options={})
    assert load(resnet18, name="resnet18", min_match=100 / 102, **keys).num_loaded == 100
    with raises_problem("conflict", "model.weights", "100 of the 102 entries of resnet18", "model.min_match=0.98"):
        load(resnet18, name="resnet18", min_match=1, **keys)


class Hidden:
    """An object that can only be unpickled by running code."""


def test_load_weights_rejects_file_without_weights_in_one_sentence(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save(Hidden(), whole)
    valid = tmp_path / "valid.pt"
    torch.save(build().state_dict(), valid)
    (tmp_path / "cut.pt").write_bytes(valid.read_bytes()[:-1000])
    save_file({"a": torch.zeros(9)}, tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", 40)
    (tmp_path / "text.pt").write_text("no weights")
    (tmp_path / "code.pt").write_bytes(pickle.dumps(Hidden(), protocol=2))
    torch.save([1, 2], tmp_path / "list.pt")
    changed = checkpoint(tmp_path / "run", build().state_dict())
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    for path, code in {
        whole: "untrusted-code",
        tmp_path / "code.pt": "untrusted-code",
        tmp_path / "cut.pt": "damaged",
        tmp_path / "cut.safetensors": "damaged",
        tmp_path / "text.pt": "damaged",
        tmp_path / "list.pt": "wrong-format",
        changed: "damaged",
    }.items():
        with raises_problem(code, "model.weights", f"{path} "):
            load(build(), weights=str(path))


def test_weights_problems_report_missing_file_before_start(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "best.pt").write_bytes(b"x")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "opt").mkdir()
    for name, code, value in (
        ("emptty.pt", "not-found", "; did you mean empty.pt?"),
        ("nope.pt", "not-found", ""),
        ("empty.pt", "damaged", ""),
        ("run", "not-a-file", tmp_path / "run" / "checkpoints" / "best.pt"),
    ):
        (problem,) = weights_problems(config(weights=str(tmp_path / name)))
        assert has_problem([problem], code, "model.weights", f"{tmp_path / name} ", value)
        assert (";" in str(problem)) is bool(value)
    assert weights_problems(config(weights="pretrained")) == weights_problems(config()) == []


# Weights of the libraries


@pytest.fixture
def torch_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch.hub's folder, with the network disabled."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    # urllib keeps the proxies of the first download in a process.
    monkeypatch.setattr("urllib.request._opener", None)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def test_pretrained_torchvision_weights_sum_stem_for_grayscale(torch_hub_cache: Path) -> None:
    published = models.resnet18()
    torch.save(published.state_dict(), torch_hub_cache / "resnet18-f37072fd.pth")
    model = build(1, name="resnet18", options={})
    loaded = load(model, name="resnet18", options={}, weights="pretrained")
    assert loaded.describe() == (
        "pretrained weights of resnet18: loaded 100 of the 102 entries of the model; conv1.weight summed over its "
        "color channels; skipped: fc.weight (1000x512 instead of 5x512), fc.bias (1000 instead of 5)"
    )
    published.fc, model.fc = nn.Identity(), nn.Identity()
    gray = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.allclose(model.eval()(gray), published.eval()(gray.expand(2, 3, 32, 32)), atol=1e-5)


class PickledCode:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (os.environ["PLANTED"],)


def test_pretrained_weights_run_no_pickled_code(
    torch_hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    torch.save({"conv1.weight": PickledCode()}, torch_hub_cache / "resnet18-f37072fd.pth")
    with raises_problem("download-failed", "model.weights", " resnet18 "):
        load(build(3, name="resnet18", options={}), name="resnet18", options={}, weights="pretrained")
    assert not (tmp_path / "planted").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_pretrained_vit_weights_are_resized_to_image_size(torch_hub_cache: Path) -> None:
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in models.vit_b_16().state_dict().items()}
    # A file of a single zero in place of 330 MB.
    published = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    position_embedding = published["encoder.pos_embedding"] = torch.empty(1, 1 + (224 // 16) ** 2, 768)
    position_embedding[:, 0], position_embedding[:, 1:] = 7, 3
    torch.save(published, torch_hub_cache / "vit_b_16-c867db91.pth")
    resized = pretrained_weights(config(name="vit_b_16", options={}).model, 32)["encoder.pos_embedding"]
    assert resized.shape == (1, 1 + (32 // 16) ** 2, 768)
    assert torch.equal(resized[:, 0], position_embedding[:, 0])
    assert torch.allclose(resized[:, 1:], position_embedding[:, 1:5])


def test_pretrained_timm_weights_come_from_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    published = timm.create_model("test_resnet")
    stored = tmp_path / "models--timm--test_resnet.r160_in1k"
    (stored / "snapshots" / "abc").mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    save_file(published.state_dict(), stored / "snapshots" / "abc" / "model.safetensors")
    model = build(1, name="test_resnet", options={})
    loaded = load(model, name="test_resnet", options={}, weights="pretrained")
    assert loaded.skipped == ("fc.weight (1000x96 instead of 5x96)", "fc.bias (1000 instead of 5)")
    assert loaded.adapted_stem == "conv1.0.weight"
    backbone = {
        name: value for name, value in published.state_dict().items() if not name.startswith(("fc.", "conv1.0"))
    }
    assert same(model, backbone)


def test_pretrained_weights_without_network_report_one_sentence(
    torch_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(torch_hub_cache.parent))
    for name, address, file, cache in (
        ("squeezenet1_1", models.get_model_weights("squeezenet1_1")["DEFAULT"].url, "", torch_hub_cache),
        ("test_resnet", "/timm/test_resnet.r160_in1k", "model.safetensors", torch_hub_cache.parent),
    ):
        model = build(3, name=name, options={})
        with raises_problem("download-failed", "model.weights", f" {name} ", address, file, cache):
            load(model, name=name, options={}, weights="pretrained")


def test_load_weights_detects_safetensors_by_content(tmp_path: Path) -> None:
    source_weights = build().state_dict()
    for name in ("w.safetensors", "w.bin"):
        save_file(source_weights, tmp_path / name)
        model = build()
        load(model, weights=str(tmp_path / name))
        assert same(model, source_weights)


def test_load_weights_lists_skipped_entries_with_reason() -> None:
    weights = build(classes=10).state_dict() | {"extra.weight": torch.zeros(3)}
    del weights["bn1.bias"]
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = copy_matching_weights(model, weights, "weights of x")
    assert loaded.skipped == (
        "fc.weight (10x32 instead of 5x32)",
        "fc.bias (10 instead of 5)",
        "extra.weight (not in the model)",
        "bn1.bias (not in the file)",
    )
    num_entries = sum(not name.endswith("_tracked") for name in before)
    assert loaded.describe() == (
        f"weights of x: loaded {num_entries - 3} of the {num_entries} entries of the model; "
        f"skipped: {', '.join(loaded.skipped)}"
    )
    assert same(model, {name: before[name] for name in ("fc.weight", "fc.bias", "bn1.bias")})
    assert torch.equal(model.state_dict()["conv1.weight"], weights["conv1.weight"])


def test_load_weights_rejects_file_without_matching_entries(tmp_path: Path) -> None:
    torch.save({"bn1.wieght": torch.zeros(4), "bn1.num_batches_tracked": torch.tensor(7)}, tmp_path / "w.pt")
    with raises_problem("conflict", "model.weights", tmp_path / "w.pt", "bn1.wieght (", "bn1.weight?"):
        load(build(), weights=str(tmp_path / "w.pt"))
    torch.save(build(options={"width": 8}).state_dict(), tmp_path / "wide.pt")
    with raises_problem("conflict", "model.weights", "conv1.weight (8x1x3x3 ", " 4x1x3x3), "):
        load(build(), weights=str(tmp_path / "wide.pt"))


def test_fetched_once_downloads_on_one_rank(torch_hub_cache: Path) -> None:
    fetched = []

    def rank() -> None:
        with download_lock("https://example.org/weights-0a1b.pth"):
            if not (torch_hub_cache / "weights-0a1b.pth").exists():
                time.sleep(0.05)
                fetched.append(1)
                (torch_hub_cache / "weights-0a1b.pth").touch()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(rank) for _ in range(4)]:
            done.result(60)
    assert len(fetched) == 1


def test_pretrained_weights_are_rejected_for_models_without_any() -> None:
    for name in ("cnn", "mycode.nets:build"):
        with raises_problem("not-found", "model.weights", f" {name}"):
            validate_config({"model": {"name": name, "weights": "pretrained"}})
    with raises_problem("not-found", "model.weights", "timm ", " test_mambaout; "):
        load(nn.Linear(1, 1), name="test_mambaout", options={}, weights="pretrained")
