"""Helper process of `engine.models.catalog`: it imports a model library, and lists its models, or the input
transforms of their pretrained weights."""

from __future__ import annotations

from collections.abc import Callable

from engine.models.catalog import CatalogModel, CatalogRequest, ModelListing
from engine.models.input_listing import INPUT_LISTERS
from engine.models.pretrained_input import InputListing
from engine.utils.answers import Answer
from engine.utils.errors import UsageError
from engine.utils.helper_process import ParentPipe
from engine.utils.libraries import import_library


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
