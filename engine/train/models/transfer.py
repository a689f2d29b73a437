"""Load initial weights: pretrained ones of a library, or those of a file. Entries that do not match are skipped."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from engine.base.codec import InvalidRecordError, decode
from engine.base.errors import UsageError, did_you_mean
from engine.base.files import exclusive_lock
from engine.base.libraries import import_library
from engine.base.text import list_names
from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.runs.checkpoint_files import (
    DamagedCheckpointError,
    check_expansion,
    check_format,
    is_checkpoint,
    verify_checksum,
)
from engine.train.models.catalog import resolve_model_source
from engine.train.models.factory import first_convolution, timm_img_size_kwargs
from engine.train.models.freeze import classifier_paths
from engine.train.models.weights_file import weights_file_problem

StateDict = dict[str, Tensor]

MAX_LISTED_ENTRIES = 10

# Keys under which other programs' checkpoints store the weights. EMA weights come first: they are usually better.
_STATE_DICT_KEYS = ("ema", "model", "state_dict", "model_state_dict")


@dataclass(frozen=True)
class LoadedWeights:
    """How many of the `num_entries` of the model were loaded, and which were skipped in the file or the model, with the
    reason."""

    source: str
    num_loaded: int
    num_entries: int
    skipped: tuple[str, ...]
    adapted_stem: str | None = None

    def describe(self) -> str:
        text = f"{self.source}: loaded {self.num_loaded} of the {self.num_entries} entries of the model"
        if self.adapted_stem:
            text += f"; {self.adapted_stem} summed over its color channels"
        if self.skipped:
            text += f"; skipped: {list_names(self.skipped, MAX_LISTED_ENTRIES)}"
        return text


def load_weights(model: nn.Module, config: Config, image_size: int, classes: Sequence[str]) -> LoadedWeights | None:
    """Load `model.weights` into a model on the CPU; return None if the key is not set. If a gputrain checkpoint has
    other classes, but as many, its classification head is skipped. Raises UsageError if the weights are unavailable or
    fewer of them match than `model.min_match`."""
    weights, mismatched_classifier = config.model.weights, list[str]()
    if weights is None:
        return None
    if weights == "pretrained":
        state_dict, source = pretrained_weights(config.model, image_size), f"pretrained weights of {config.model.name}"
    else:
        (state_dict, stored_classes), source = read_weights_file(Path(weights)), f"weights of {weights}"
        if stored_classes is not None and stored_classes != list(classes):
            # The entries of the head with one row per class.
            heads, entries = tuple(f"{name}." for name in classifier_paths(model)), model.state_dict()
            rows = {name: value.shape[:1] for name, value in entries.items() if name.startswith(heads)}
            mismatched_classifier = [name for name, count in rows.items() if count == (len(classes),)]
    loaded = copy_matching_weights(model, state_dict, source, mismatched_classifier)
    share, minimum = loaded.num_loaded / loaded.num_entries, config.model.min_match
    if share < minimum:
        # Training would begin with a mostly random model.
        count = f"only {loaded.num_loaded} of the {loaded.num_entries} entries of {config.model.name}"
        skipped = list_names(loaded.skipped, MAX_LISTED_ENTRIES)
        reason = f"{source} fit {count}, less than model.min_match={minimum:g}: {skipped}"
        lower = math.floor(share * 100) / 100
        advice = f"use the model of these weights, or model.min_match={lower:g} to begin with random weights elsewhere"
        raise UsageError.one("model.weights", reason, advice, code="conflict")
    return loaded


def copy_matching_weights(
    model: nn.Module, weights: Mapping[str, Tensor], source: str, mismatched_classifier: Collection[str] = ()
) -> LoadedWeights:
    """Copy each entry whose name and shape match the model. For a model of grayscale images, the first convolution of a
    color model is summed over its input channels, which gives the same output for three equal channels. Raises
    UsageError if nothing matches."""
    model_state: StateDict = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    first = first_convolution(model)
    stem = f"{first[0]}.weight".removeprefix(".") if first else None
    matching: StateDict = {}
    skipped: list[str] = []
    adapted = None
    for raw, value in weights.items():
        name = raw if raw in model_state else _strip_wrapper_prefixes(raw)
        if name not in model_state:
            skipped.append(f"{raw} (not in the model)")
            continue
        shape = model_state[name].shape
        if name == stem and value.ndim == 4 and shape == (value.shape[0], 1, *value.shape[2:]) != value.shape:
            value, adapted = value.sum(1, keepdim=True), name
        if value.shape != shape:
            skipped.append(f"{name} ({_format_shape(value)} instead of {_format_shape(model_state[name])})")
        elif name in mismatched_classifier:
            skipped.append(f"{name} (of other classes)")
        else:
            matching[name] = value
    seen = {name for raw in weights for name in (raw, _strip_wrapper_prefixes(raw))}
    skipped += [f"{name} (not in the file)" for name in model_state if name not in seen and _is_counted(name)]
    # A bias alone can match a different network by chance.
    if not any(name in matching for name, parameter in model.named_parameters() if parameter.ndim > 1):
        hint = did_you_mean(_strip_wrapper_prefixes(next(iter(weights))), model_state)
        raise UsageError.one(
            "model.weights", f"{source}: no entry matches the model: {', '.join(skipped[:3])}{hint}", code="conflict"
        )
    model.load_state_dict(matching, strict=False)
    num_loaded, num_entries = (sum(map(_is_counted, names)) for names in (matching, model_state))
    return LoadedWeights(source, num_loaded, num_entries, tuple(skipped), adapted)


def _is_counted(name: str) -> bool:
    """Whether an entry is one that weights must have. Files written before torch 0.4.1 lack BatchNorm's
    num_batches_tracked."""
    return not name.endswith("_tracked")


def _strip_wrapper_prefixes(name: str) -> str:
    """Remove the prefixes of DDP and torch.compile."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _format_shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "one number"


def load_mapped(path: Path) -> Any:
    """Return the content of a file with its tensors mapped into memory, or read where they cannot be mapped.

    No code in the file runs. Raises exceptions of any type if the content is damaged or not allowed.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        # torch before 1.6 wrote no ZIP archives, and mmap(2) fails with ENODEV on some FUSE file systems. What is
        # damaged fails again.
        return torch.load(path, map_location="cpu", weights_only=True)


def read_weights_file(path: Path) -> tuple[StateDict, list[str] | None]:
    """Read weights without running code: safetensors, or a state dict, a gputrain checkpoint or another program's
    checkpoint saved by `torch.save`. Also returns the class names if gputrain wrote the file. Raises UsageError."""
    if problem := weights_file_problem(path):
        raise UsageError([problem])
    try:
        with path.open("rb") as file:
            # A safetensors file begins with the length of a JSON header (8 bytes) and that header.
            if file.read(9)[8:] == b"{" or path.suffix == ".safetensors":
                return _read_safetensors(path)
            check_expansion(file)
            stored = load_mapped(path)
            if is_checkpoint(stored):
                verify_checksum(file)
    except DamagedCheckpointError as error:
        raise UsageError.one("model.weights", f"{path} {error}", code="damaged") from error
    except pickle.UnpicklingError as error:
        # torch has no exception type for a disallowed global, only this text.
        if "GLOBAL" in str(error):
            reason = f"{path} contains pickled code, which is not loaded; save the model's state_dict() instead"
            raise UsageError.one("model.weights", reason, code="untrusted-code") from error
        raise UsageError.one("model.weights", f"{path} is damaged or not a weights file", code="damaged") from error
    except Exception as error:
        # The readers raise many exception types for malformed files.
        text = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError.one(
            "model.weights", f"{path} is damaged or not a weights file: {text}", code="damaged"
        ) from error
    if is_checkpoint(stored):
        check_format(path, stored["format"])
    return _extract_state_dict(stored, path)


def _read_safetensors(path: Path) -> tuple[StateDict, list[str] | None]:
    """Read the weights of a safetensors file, and its class names if `gputrain export` wrote it."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        classes_json = (file.metadata() or {}).get("classes")
        entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    classes = None
    if classes_json is not None:
        # Another program may have an entry of this name.
        with suppress(InvalidRecordError):
            classes = decode(classes_json, list[str])
    return entries, classes


def _extract_state_dict(content: Any, path: Path) -> tuple[StateDict, list[str] | None]:
    if isinstance(content, Mapping):
        nested = next((content[key] for key in _STATE_DICT_KEYS if isinstance(content.get(key), Mapping)), content)
        if entries := {str(name): value for name, value in nested.items() if isinstance(value, Tensor)}:
            return entries, content["classes"] if is_checkpoint(content) else None
    raise UsageError.one(
        "model.weights",
        f"{path} contains no state dict, neither at the top level nor under {', '.join(_STATE_DICT_KEYS)}",
        code="wrong-format",
    )


def pretrained_weights(model: ModelConfig, image_size: int) -> StateDict:
    """Return the library's pretrained weights, downloaded once per node. Position embeddings of vision transformers are
    interpolated to `image_size` x `image_size`. Raises UsageError."""
    source = resolve_model_source(model)
    if source in ("user", "builtin"):
        raise UsageError.one(
            "model.weights",
            f"there are no pretrained weights for {model.name}; set model.weights=null, or to a file",
            code="not-found",
        )
    return (_torchvision_weights if source == "torchvision" else _timm_weights)(model.name, image_size)


@contextmanager
def _download_errors(name: str, address: str, offline: str) -> Iterator[None]:
    """Raise UsageError if the weights of a model cannot be loaded in the block from their address. `offline` says how
    to put them into the cache, as a clause."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        # The network, the disk and both libraries raise their own exceptions.
        text = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        reason = f"the pretrained weights of {name} cannot be loaded from {address}: {type(error).__name__}: {text}"
        advice = f"without a network connection, {offline}, or set model.weights to a file"
        raise UsageError.one("model.weights", reason, advice, code="download-failed") from error


def _torchvision_weights(name: str, image_size: int) -> StateDict:
    from torchvision import models
    from torchvision.models.vision_transformer import interpolate_embeddings

    offered = models.get_model_weights(name)
    if not len(offered):
        raise UsageError.one(
            "model.weights",
            f"torchvision has no pretrained weights for {name}; set model.weights to a file",
            code="not-found",
        )
    default: Any = offered["DEFAULT"]
    with _download_errors(name, default.url, _copy_to_hub(default.url)), download_lock(default.url), _weights_only():
        # Built by torchvision itself, because it renames the entries of some files.
        model = models.get_model(name, weights=default, progress=False)
    state = model.state_dict()
    if name.startswith("vit_"):
        state = interpolate_embeddings(image_size, model.patch_size, state)
    return dict(state)


def _timm_weights(name: str, image_size: int) -> StateDict:
    timm = import_library("timm", "model.source")
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    img_size_kwargs = timm_img_size_kwargs(name, image_size)
    pretrained_cfg = timm.models.get_pretrained_cfg(name)
    if pretrained_cfg is None or not pretrained_cfg.has_weights:
        raise UsageError.one(
            "model.weights", f"timm has no pretrained weights for {name}; set model.weights to a file", code="not-found"
        )
    url = pretrained_cfg.url if isinstance(pretrained_cfg.url, str) and not pretrained_cfg.hf_hub_id else None
    if url is None:
        repository, file = pretrained_cfg.hf_hub_id, pretrained_cfg.hf_hub_filename or "model.safetensors"
        address = f"{constants.ENDPOINT}/{repository}"
        offline = f"fill the cache {constants.HF_HUB_CACHE} with `hf download {repository} {file}` where there is one"
    else:
        address, offline = url, _copy_to_hub(url)
    with _download_errors(name, address, offline), download_lock(url), _weights_only():
        model = timm.create_model(name, pretrained=True, **img_size_kwargs)
    return dict(model.state_dict())


@contextmanager
def _weights_only() -> Iterator[None]:
    """Let torch.load run no pickled code in the block: torch.hub, and timm in old releases, pass weights_only=False."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    if "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" in os.environ or name in os.environ:
        # Set by the user; torch refuses both.
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def _hub_path(url: str) -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name


def _copy_to_hub(url: str) -> str:
    """Return how to put a file into the cache without a network, as a clause."""
    return f"copy {url} to {_hub_path(url)}"


@contextmanager
def download_lock(url: str | None) -> Iterator[None]:
    """Let one rank per node at a time download a missing torch.hub file. Hugging Face's hub, for which `url` is None,
    has its own lock."""
    if url is None or _hub_path(url).exists():
        yield
        return
    folder = _hub_path(url).parent
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder / ".gputrain.lock"):
        yield
