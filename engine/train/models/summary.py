"""Summarize a model: output shape, parameters and multiply-adds of each layer.

Multiply-adds are those of convolutions, matrix products and attention in one forward pass: half of what torch's
FlopCounterMode counts. Elementwise operations, such as normalization and activations, are not counted, which is the
field's convention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from engine.config.data_sections import ENCODED_DATASETS
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.train.data.sources.base import ImageFormat
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import expected_input_format, open_source, read_class_names
from engine.train.models.factory import build_model, check_model, weight_bytes
from engine.train.models.freeze import freeze
from engine.train.models.pretrained_input import (
    describe_pretrained_input,
    fill_input_keys,
)
from engine.train.optim.param_groups import ParamGroupSummary, count_parameters, summarize_param_groups

Shape = tuple[int, ...]
# Classes of a model that is summarized without a dataset: those of ImageNet, with which its library publishes it.
IMAGENET_CLASSES = 1000
# Number of classes of a built-in dataset; the others have ten.
DATASET_NUM_CLASSES = {"cifar100": 100}


@dataclass(frozen=True)
class LayerSummary:
    """A module. `parameters`, `trainable` and `multiply_adds` include its submodules. `output` is the shape of its last
    output, None if it was not called or returned no tensor."""

    path: str
    kind: str
    depth: int
    output: Shape | None
    parameters: int
    trainable: int
    multiply_adds: int


@dataclass(frozen=True)
class ModelSummary:
    """`images` is the input shape. `layers` are in order of definition, the whole model first. `groups` are the
    parameter groups of the optimizer. `input` describes the model's input in training and evaluation."""

    model: str
    images: Shape
    classes: int
    parameters: int
    trainable: int
    buffers: int
    weight_bytes: int
    multiply_adds: int
    layers: list[LayerSummary]
    groups: list[ParamGroupSummary]
    input: str


def summarize_model(config: Config, batch_size: int = 1) -> ModelSummary:
    """Summarize the model of a config for a batch of its images, with random weights. Raises UsageError."""
    config, pretrained = fill_input_keys(config)
    images, classes = input_spec(config)
    shape = (batch_size, images.channels, images.size, images.size)
    try:
        with torch.device("meta"):
            model = build_untrained_model(config, images.channels, classes, images.size)
        shapes, multiply_adds = trace_model(model, torch.empty(shape, device="meta"))
    except Exception:
        # A forward pass that reads tensor values fails on the meta device, with any exception.
        model = build_untrained_model(config, images.channels, classes, images.size)
        check_model(model, config, images, images.size, classes)
        shapes, multiply_adds = trace_model(model, torch.zeros(shape))
    return ModelSummary(
        model=config.model.name,
        images=shape,
        classes=classes,
        parameters=count_parameters(model),
        trainable=count_parameters(model, trainable=True),
        buffers=sum(buffer.numel() for buffer in model.buffers()),
        weight_bytes=weight_bytes(model),
        multiply_adds=multiply_adds.get("", 0),
        layers=[
            LayerSummary(
                path=path,
                kind=type(module).__name__,
                depth=path.count(".") + 1 if path else 0,
                output=shapes.get(path),
                parameters=count_parameters(module),
                trainable=count_parameters(module, trainable=True),
                multiply_adds=multiply_adds.get(path, 0),
            )
            for path, module in model.named_modules()
        ],
        groups=summarize_param_groups(config.optim, model),
        input=", ".join(filter(None, (images.describe(), describe_pretrained_input(config, pretrained)))),
    )


def without_dataset(config: Config) -> Config:
    """Return a config whose model is summarized as its library publishes it: RGB images of the default size, and 1,000
    classes. Keys that are set stay."""
    update = {"dataset": "folder", "num_classes": config.data.num_classes or IMAGENET_CLASSES}
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def build_untrained_model(config: Config, channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Build the model of a config with random weights, regardless of `model.weights`, and apply `model.freeze`."""
    model = build_model(config, channels, num_classes, image_size)
    freeze(model, config.model)
    return model


def input_spec(config: Config) -> tuple[ImageFormat, int]:
    """Return the image format and the number of classes without reading each image. User data is opened. Raises
    UsageError."""
    data, likely = config.data, expected_input_format(config)
    if is_user_code(data.dataset):
        source = open_source(config)
        return model_input_format(config, source), len(source.classes)
    if data.num_classes is not None:
        return likely, data.num_classes
    if data.dataset in ENCODED_DATASETS:
        return likely, len(read_class_names(config))
    return likely, DATASET_NUM_CLASSES.get(data.dataset, 10)


def trace_model(model: nn.Module, images: Tensor) -> tuple[dict[str, Shape | None], dict[str, int]]:
    """Trace one forward pass in evaluation mode: return the last output of each path, and the multiply-adds summed
    over all its calls."""
    shapes, multiply_adds, flops_before = dict[str, Shape | None](), dict[str, int](), list[int]()
    counter = FlopCounterMode(display=False)

    def leave(path: str, output: Any) -> None:
        shapes[path] = first_shape(output)
        flops = counter.get_total_flops() - flops_before.pop()
        multiply_adds[path] = multiply_adds.get(path, 0) + flops // 2

    handles = []
    for path, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_: flops_before.append(counter.get_total_flops())),
            module.register_forward_hook(lambda _, __, output, path=path: leave(path, output)),
        ]
    training, has_fastpath = model.training, torch.backends.mha.get_fastpath_enabled()
    model.eval()
    # A fused operation of nn.MultiheadAttention in inference, which hooks cannot see into.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with images.device, counter, torch.no_grad():
            model(images)
    finally:
        model.train(training)
        torch.backends.mha.set_fastpath_enabled(has_fastpath)
        for handle in handles:
            handle.remove()
    return shapes, multiply_adds


def first_shape(value: Any) -> Shape | None:
    """Return the shape of the first tensor in nested containers."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((shape for part in parts if (shape := first_shape(part)) is not None), None)
