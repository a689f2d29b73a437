"""Helper process of `engine.models.catalog`: it imports a model library, lists or counts its models, or lists the input
transforms of their pretrained weights."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from engine.models.catalog import CatalogModel, CatalogRequest, ModelListing
from engine.models.input_listing import INPUT_LISTERS
from engine.models.pretrained_input import InputListing
from engine.utils.answers import Answer
from engine.utils.errors import UsageError
from engine.utils.helper_process import ParentPipe
from engine.utils.host import available_cores
from engine.utils.libraries import import_library
from engine.utils.process import die_with_parent

if TYPE_CHECKING:
    from torch import nn

MAX_PROCESSES = 8
# Fewer models are not worth another process.
MIN_MODELS_PER_PROCESS = 10


def main(parent: ParentPipe) -> None:
    """Answer the tasks `models` and `inputs` with a listing, the task `count` with the parameters of each name, None if
    it cannot be built.

    If the library cannot be imported, the only answer has the problems."""
    request = parent.receive(CatalogRequest)
    source = request.source
    try:
        if source != "builtin":
            # Before the fork of `parameter_counts`, so that it is imported once.
            import_library(source, "model.source")
    except UsageError as error:
        parent.send(Answer.refuse(error))
        return
    if request.task == "models":
        parent.send(Answer(ModelListing(models=tuple(MODEL_LISTERS[source]()))))
        return
    if request.task == "inputs":
        parent.send(Answer(InputListing(inputs=INPUT_LISTERS[source]())))
        return
    for count in parameter_counts(source, request.names):
        parent.send(Answer(count))


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


def _parameter_count(source: str, name: str) -> int | None:
    """Return the parameter count of a library's default model, None if it cannot be built."""
    # Imported here because it imports torch, which takes longer than to find that timm is broken.
    from engine.models.meta_device import build_on_meta
    from engine.optim.param_groups import count_parameters

    try:
        model = build_on_meta(lambda: _build_default_model(source, name))
    except Exception:
        # Some of timm's models need packages that are not installed.
        return None
    return count_parameters(model)


def _build_default_model(source: str, name: str) -> nn.Module:
    model: nn.Module
    if source == "timm":
        import timm

        model = timm.create_model(name)
        return model
    if source == "torchvision":
        from torchvision import models

        model = models.get_model(name, weights=None)
        return model
    from engine.config.schema import Config
    from engine.config.training_sections import ModelConfig
    from engine.models.summary import build_untrained_model

    # CIFAR-10's shape, because the built-in models are for small images.
    return build_untrained_model(Config(model=ModelConfig(name=name, source="builtin")), 3, 10, 32)


def parameter_counts(source: str, names: Sequence[str]) -> Iterator[int | None]:
    """Yield the parameter count of each model in order, with several processes if there are many."""
    processes = min(available_cores(), MAX_PROCESSES, len(names) // MIN_MODELS_PER_PROCESS)
    count = partial(_parameter_count, source)
    if processes < 2:
        yield from map(count, names)
        return
    with multiprocessing.get_context("fork").Pool(processes, die_with_parent, (os.getpid(),)) as pool:
        yield from pool.imap(count, names, chunksize=4)
