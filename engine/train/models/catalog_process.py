"""Helper process of `engine.train.models.catalog`: it imports a model library, and lists its models and the input
transforms of their pretrained weights. It downloads nothing."""

from __future__ import annotations

import math
from typing import Any, get_args

from engine.base.answers import Answer
from engine.base.helper_process import ParentPipe
from engine.base.libraries import import_library
from engine.config.data_sections import Fit, Interpolation
from engine.train.models.catalog import CatalogModel, ModelListing, PretrainedInput

# Networks whose weights expect pixels from -1 to 1. torchvision converts their ImageNet normalization inside the
# network (`transform_input`), which `engine.train.models.factory` turns off, because it depends on the dataset.
_TRANSFORM_INPUT_MODELS = ("googlenet", "inception_v3")
_FIT_OF_CROP_MODE: dict[str, Fit] = {"center": "crop", "squash": "squash"}


def main(parent: ParentPipe) -> None:
    """Answer the name of a library with its listing, or with the problems of its import."""
    source = parent.receive(str)

    def list_models() -> ModelListing:
        import_library(source, "model.source")
        return list_torchvision() if source == "torchvision" else list_timm()

    parent.send(Answer.of(list_models))


def list_torchvision() -> ModelListing:
    """List the models of torchvision. The inputs are `transforms()` of the default weights."""
    from torchvision import models

    entries, inputs = list[CatalogModel](), dict[str, PretrainedInput]()
    for name in models.list_models(module=models):
        offered = models.get_model_weights(name)
        if not len(offered):
            entries.append(CatalogModel(source="torchvision", name=name))
            continue
        # `DEFAULT` is an alias of one of the others.
        default: Any = offered["DEFAULT"]
        entries.append(
            CatalogModel(
                source="torchvision",
                name=name,
                parameters=default.meta.get("num_params"),
                weights=(default.name, *(member.name for member in offered if member is not default)),
                top1=default.meta.get("_metrics", {}).get("ImageNet-1K", {}).get("acc@1"),
            )
        )
        transforms = default.transforms()
        crop, resize = transforms.crop_size[0], transforms.resize_size[0]
        is_converted = name in _TRANSFORM_INPUT_MODELS
        inputs[name] = PretrainedInput(
            weights=str(default),
            image_size=crop,
            val_crop=crop,
            val_resize=resize,
            crop_ratio=crop / resize,
            fit="crop",
            interpolation=transforms.interpolation.value,
            mean=(0.5, 0.5, 0.5) if is_converted else tuple(transforms.mean),
            std=(0.5, 0.5, 0.5) if is_converted else tuple(transforms.std),
        )
    return ModelListing(models=tuple(entries), inputs=inputs)


def list_timm() -> ModelListing:
    """List the models of timm. The inputs, with and without tag, are those of timm's data config.

    The evaluation has the test size of the weights, as in timm's validate.py, whose figures timm publishes. Inputs of
    weights for images that are not square are left out.
    """
    import timm

    tags: dict[str, list[str]] = {}
    pretrained, entries, inputs = timm.list_models(pretrained=True), list[CatalogModel](), dict[str, PretrainedInput]()
    for name in pretrained:
        architecture, _, tag = name.partition(".")
        tags.setdefault(architecture, []).append(tag)
    for name in timm.list_models():
        default = timm.get_pretrained_cfg(name)
        default_tag = default.tag if default is not None else ""
        # The default first, if it has weights.
        available = sorted(tags.get(name, []), key=default_tag.__ne__)
        entries.append(CatalogModel(source="timm", name=name, weights=tuple(available)))
    for name in [*pretrained, *timm.list_models()]:
        pretrained_cfg = timm.get_pretrained_cfg(name)
        if pretrained_cfg is None or not pretrained_cfg.has_weights:
            continue
        architecture = name.partition(".")[0]
        values = _timm_input(f"{architecture}.{pretrained_cfg.tag}", vars(pretrained_cfg))
        if values is not None:
            inputs[name] = values
    return ModelListing(models=tuple(entries), inputs=inputs)


def _timm_input(weights: str, pretrained_cfg: dict[str, Any]) -> PretrainedInput | None:
    import timm.data

    resolve_data_config: Any = timm.data.resolve_data_config
    training = resolve_data_config(pretrained_cfg=pretrained_cfg)
    test = resolve_data_config(pretrained_cfg=pretrained_cfg, use_test_size=True)
    if pretrained_cfg.get("fixed_input_size"):
        test = training
    (_, height, size), (_, val_height, crop) = training["input_size"], test["input_size"]
    if (height, val_height) != (size, crop):
        return None
    mean: Any = tuple(test["mean"])
    std: Any = tuple(test["std"])
    return PretrainedInput(
        weights=weights.rstrip("."),
        image_size=size,
        val_crop=crop,
        # As in timm.data.transforms_factory.
        val_resize=math.floor(crop / test["crop_pct"]),
        crop_ratio=test["crop_pct"],
        fit=_FIT_OF_CROP_MODE.get(test["crop_mode"], "crop"),
        interpolation=test["interpolation"] if test["interpolation"] in get_args(Interpolation) else "bicubic",
        mean=mean,
        std=std,
    )
