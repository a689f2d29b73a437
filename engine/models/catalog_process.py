"""Helper process of `engine.models.catalog`: it imports a model library, and lists its models, or the input
transforms of their pretrained weights. It downloads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from engine.config.data_sections import Fit, Interpolation
from engine.models.catalog import CatalogModel, CatalogRequest, ModelListing
from engine.models.pretrained_input import InputListing, PretrainedInput
from engine.utils.answers import Answer
from engine.utils.errors import UsageError
from engine.utils.helper_process import ParentPipe
from engine.utils.libraries import import_library

# Networks whose weights expect pixels from -1 to 1. torchvision converts their ImageNet normalization inside the
# network (`transform_input`), which `engine.models.factory` turns off, because it depends on the dataset.
_TRANSFORM_INPUT_MODELS = ("googlenet", "inception_v3")
_FIT_OF_CROP_MODE: dict[str, Fit] = {"center": "crop", "squash": "squash"}


def main(parent: ParentPipe) -> None:
    """Answer the task `models` or `inputs` with a listing, or with the problems of the import of the library."""
    request = parent.receive(CatalogRequest)
    source = request.source
    try:
        import_library(source, "model.source")
    except UsageError as error:
        parent.send(Answer.refuse(error))
        return
    if request.task == "models":
        parent.send(Answer(ModelListing(models=tuple(MODEL_LISTERS[source]()))))
    else:
        parent.send(Answer(InputListing(inputs=INPUT_LISTERS[source]())))


def list_torchvision_models() -> list[CatalogModel]:
    from torchvision import models

    entries = []
    for name in models.list_models(module=models):
        weights = models.get_model_weights(name)
        # `DEFAULT` is an alias of one of the others.
        default = weights.DEFAULT if len(weights) else None
        meta = {} if default is None else default.meta
        weight_names = (
            [] if default is None else [default.name, *(member.name for member in weights if member is not default)]
        )
        top1 = meta.get("_metrics", {}).get("ImageNet-1K", {}).get("acc@1")
        entries.append(
            CatalogModel(
                source="torchvision",
                name=name,
                parameters=meta.get("num_params"),
                weights=tuple(weight_names),
                top1=top1,
            )
        )
    return entries


def list_timm_models() -> list[CatalogModel]:
    import timm

    tags: dict[str, list[str]] = {}
    for name in timm.list_models(pretrained=True):
        architecture, _, tag = name.partition(".")
        tags.setdefault(architecture, []).append(tag)
    entries = []
    for name in timm.list_models():
        default = timm.get_pretrained_cfg(name)
        default_tag = default.tag if default is not None else ""
        # timm's default entry can have no weights.
        available = tags.get(name, [])
        weight_names = (
            *(tag for tag in available if tag == default_tag),
            *(tag for tag in available if tag != default_tag),
        )
        entries.append(CatalogModel(source="timm", name=name, weights=weight_names))
    return entries


MODEL_LISTERS: dict[str, Callable[[], list[CatalogModel]]] = {
    "torchvision": list_torchvision_models,
    "timm": list_timm_models,
}


def list_torchvision_inputs() -> dict[str, PretrainedInput]:
    """Return the inputs by model name, from `transforms()` of the default weights."""
    from torchvision import models

    inputs: dict[str, PretrainedInput] = {}
    for name in models.list_models(module=models):
        offered = models.get_model_weights(name)
        if not len(offered):
            continue
        transforms = offered["DEFAULT"].transforms()
        crop, resize = transforms.crop_size[0], transforms.resize_size[0]
        mean: Any = tuple(transforms.mean)
        std: Any = tuple(transforms.std)
        if name in _TRANSFORM_INPUT_MODELS:
            mean = std = (0.5, 0.5, 0.5)
        inputs[name] = PretrainedInput(
            weights=str(offered["DEFAULT"]),
            image_size=crop,
            val_crop=crop,
            val_resize=resize,
            crop_ratio=crop / resize,
            fit="crop",
            interpolation=transforms.interpolation.value,
            mean=mean,
            std=std,
        )
    return inputs


def list_timm_inputs() -> dict[str, PretrainedInput]:
    """Return the inputs by model name, with and without tag, from timm's data config.

    The evaluation has the test size of the weights, as in timm's validate.py, whose figures timm publishes. Weights for
    images that are not square are left out.
    """
    import timm

    inputs: dict[str, PretrainedInput] = {}
    for name in [*timm.list_models(pretrained=True), *timm.list_models()]:
        pretrained_cfg = timm.get_pretrained_cfg(name)
        if pretrained_cfg is None or not pretrained_cfg.has_weights:
            continue
        architecture = name.partition(".")[0]
        values = _timm_input(f"{architecture}.{pretrained_cfg.tag}", vars(pretrained_cfg))
        if values is not None:
            inputs[name] = values
    return inputs


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


INPUT_LISTERS: dict[str, Callable[[], dict[str, PretrainedInput]]] = {
    "torchvision": list_torchvision_inputs,
    "timm": list_timm_inputs,
}
