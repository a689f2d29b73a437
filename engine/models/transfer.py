"""Weights to begin with: those that a model's library offers, or those of a file; what does not fit is left out."""

from __future__ import annotations

import fcntl
import json
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.models.factory import first_convolution, resolve_model_source, timm_img_size_kwargs
from engine.models.freeze import classifier_paths
from engine.models.weights_file import weights_file_problem
from engine.runs.checkpoint_files import CHECKPOINT_KEYS, DamagedCheckpointError, verify_checksum
from engine.utils.errors import UsageError, did_you_mean

StateDict = dict[str, Tensor]

MAX_LISTED_ENTRIES = 10

# Under what files of others keep the weights beside other things; averaged ones come first, as the better ones.
_STATE_DICT_KEYS = ("ema", "model", "state_dict", "model_state_dict")


@dataclass(frozen=True)
class WeightsFile:
    """The weights of a file by name, and the names of the classes where it is a checkpoint of ours."""

    state_dict: StateDict
    classes: list[str] | None


@dataclass(frozen=True)
class LoadedWeights:
    """What a model took of `num_entries` weights, and what was left out of the file or of the model, each with the
    reason."""

    source: str
    num_loaded: int
    num_entries: int
    skipped: tuple[str, ...]
    adapted_stem: str | None = None

    def describe(self) -> str:
        text = f"{self.source}: {self.num_loaded} of {self.num_entries} entries taken"
        if self.adapted_stem:
            text += f"; {self.adapted_stem} summed over its colours"
        if self.skipped:
            more = len(self.skipped) - MAX_LISTED_ENTRIES
            text += f"; left out: {', '.join(self.skipped[:MAX_LISTED_ENTRIES])}" + (
                f" and {more} more" if more > 0 else ""
            )
        return text


def load_weights(model: nn.Module, config: Config, image_size: int, classes: Sequence[str]) -> LoadedWeights | None:
    """Put `model.weights` into a model for images of `image_size` x `image_size` and these classes, on the CPU; None
    where there are none to put. Of a checkpoint of ours that was trained on other classes, as many as these, the layer
    that tells them is left out. Raises UsageError where the weights cannot be had, or none of them fits."""
    weights = config.model.weights
    if weights is None:
        return None
    if weights == "pretrained":
        return copy_matching_weights(
            model, pretrained_weights(config.model, image_size), f"pretrained weights of {config.model.name}"
        )
    stored = read_weights_file(Path(weights))
    others = stored.classes is not None and stored.classes != list(classes)
    telling = _classifier_entries(model, len(classes)) if others else ()
    return copy_matching_weights(model, stored.state_dict, f"weights of {weights}", telling)


def _classifier_entries(model: nn.Module, num_classes: int) -> list[str]:
    """Entries of the classifier with a row for each class."""
    heads = tuple(f"{name}." for name in classifier_paths(model))
    return [
        name
        for name, value in model.state_dict().items()
        if name.startswith(heads) and value.shape[:1] == (num_classes,)
    ]


def copy_matching_weights(
    model: nn.Module, weights: Mapping[str, Tensor], source: str, mismatched_classifier: Collection[str] = ()
) -> LoadedWeights:
    """Copy each entry whose name and shape the model has. A first convolution that saw three colours is summed over
    them for a model of grey images, which gives what it gave for an image of three like colours."""
    own: StateDict = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    found = first_convolution(model)
    stem = f"{found[0]}.weight".removeprefix(".") if found else None
    fitting: StateDict = {}
    left_out: list[str] = []
    adapted = None
    for raw, value in weights.items():
        name = raw if raw in own else _strip_wrapper_prefixes(raw)
        if name not in own:
            left_out.append(f"{raw} (not in the model)")
            continue
        wanted = own[name].shape
        if name == stem and value.ndim == 4 and wanted == (value.shape[0], 1, *value.shape[2:]) != value.shape:
            value, adapted = value.sum(1, keepdim=True), name
        if value.shape != wanted:
            left_out.append(f"{name} ({_format_shape(value)} instead of {_format_shape(own[name])})")
        elif name in mismatched_classifier:
            left_out.append(f"{name} (of other classes)")
        else:
            fitting[name] = value
    seen = {name for raw in weights for name in (raw, _strip_wrapper_prefixes(raw))}
    # Counters came to BatchNorm later than its other entries; files of before lack them.
    left_out += [f"{name} (not in the file)" for name in own if name not in seen and not name.endswith("_tracked")]
    # Biases are so short that they fit networks of other widths as well.
    if not any(name in fitting for name, parameter in model.named_parameters() if parameter.ndim > 1):
        hint = did_you_mean(_strip_wrapper_prefixes(next(iter(weights))), own)
        raise UsageError.one("model.weights", f"{source}: nothing fits: {', '.join(left_out[:3])}{hint}")
    model.load_state_dict(fitting, strict=False)
    return LoadedWeights(source, len(fitting), len(weights), tuple(left_out), adapted)


def _strip_wrapper_prefixes(name: str) -> str:
    """Without what DDP and torch.compile put before names."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _format_shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "one number"


def read_weights_file(path: Path) -> WeightsFile:
    """The weights of a file: safetensors, or what torch.save wrote of a state dict, a checkpoint of gputrain, or
    another program's that keeps its state dict under one of the usual names. Nothing in it is run. Raises
    UsageError."""
    if wrong := weights_file_problem(path):
        raise UsageError.one("model.weights", wrong)
    try:
        with path.open("rb") as file:
            # The length of a JSON header, and that header.
            is_safetensors = file.read(9)[8:] == b"{"
        if is_safetensors or path.suffix == ".safetensors":
            return _read_safetensors(path)
        stored: Any = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(stored, Mapping) and stored.keys() >= CHECKPOINT_KEYS:
            verify_checksum(path)
    except DamagedCheckpointError as error:
        raise UsageError.one("model.weights", f"{path} {error}") from error
    except pickle.UnpicklingError as error:
        # torch tells the two apart only in its text.
        needs_code = "GLOBAL" in str(error)
        why = "holds more than weights, which would run code when it is read; save the model's state_dict() instead"
        raise UsageError.one(
            "model.weights", f"{path} {why if needs_code else 'is damaged, or no file of weights'}"
        ) from error
    except Exception as error:
        # Whatever lies in a file comes out of the readers as one of many errors.
        text = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError.one("model.weights", f"{path} is damaged, or no file of weights: {text}") from error
    return _extract_state_dict(stored, path)


def _read_safetensors(path: Path) -> WeightsFile:
    """Beside the weights the classes, where `gputrain export` wrote it."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        told = (file.metadata() or {}).get("classes")
        entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    classes = None if told is None else json.loads(told)
    return WeightsFile(entries, list(map(str, classes)) if isinstance(classes, list) else None)


def _extract_state_dict(content: Any, path: Path) -> WeightsFile:
    if isinstance(content, Mapping):
        nested = next((content[key] for key in _STATE_DICT_KEYS if isinstance(content.get(key), Mapping)), content)
        if entries := {str(name): value for name, value in nested.items() if isinstance(value, Tensor)}:
            return WeightsFile(entries, content["classes"] if content.keys() >= CHECKPOINT_KEYS else None)
    raise UsageError.one(
        "model.weights", f"{path} holds no weights by name, at the top or under {', '.join(_STATE_DICT_KEYS)}"
    )


def pretrained_weights(model: ModelConfig, image_size: int) -> StateDict:
    """The library's own weights for a model, fetched once for all ranks of a host; for a transformer of torchvision
    or timm with its table of positions brought to images of `image_size` x `image_size`. Raises UsageError."""
    source = resolve_model_source(model)
    if source in ("own", "builtin"):
        raise UsageError.one("model.weights", f"there are no pretrained weights of {model.name}; give a file")
    try:
        return (
            _torchvision_weights(model.name, image_size)
            if source == "torchvision"
            else _timm_weights(model.name, image_size)
        )
    except UsageError:
        raise
    except Exception as error:
        # Of the network, the disk or either library.
        text = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise UsageError.one(
            "model.weights",
            f"the pretrained weights of {model.name} cannot be had: {type(error).__name__}: {text}; without a network "
            "give a file",
        ) from error


def _torchvision_weights(name: str, image_size: int) -> StateDict:
    from torchvision import models
    from torchvision.models.vision_transformer import interpolate_embeddings

    offered = models.get_model_weights(name)
    if not len(offered):
        raise UsageError.one("model.weights", f"torchvision has no pretrained weights of {name}; give a file")
    default: Any = offered["DEFAULT"]
    with download_lock(default.url):
        # Its own builder: for some models the names in the file are not those of the model.
        made = models.get_model(name, weights=default, progress=False)
    state = made.state_dict()
    if name.startswith("vit_"):
        state = interpolate_embeddings(image_size, made.patch_size, state)
    return dict(state)


def _timm_weights(name: str, image_size: int) -> StateDict:
    import timm
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    given = timm_img_size_kwargs(name, image_size)
    known = timm.models.get_pretrained_cfg(name)
    if known is None or not known.has_weights:
        raise UsageError.one("model.weights", f"timm has no pretrained weights of {name}; give a file")
    url = known.url if isinstance(known.url, str) and not known.hf_hub_id else None
    with download_lock(url):
        made = timm.create_model(name, pretrained=True, **given)
    return dict(made.state_dict())


@contextmanager
def download_lock(url: str | None) -> Iterator[None]:
    """One rank of a host at a time, where a file of torch.hub is missing: each that finds it missing would fetch it.
    Hugging Face's hub, for whose files no `url` is given, has a lock of its own."""
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    if url is None or (folder / Path(urlparse(url).path).name).exists():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".gputrain.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
