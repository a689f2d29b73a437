"""List the models of torchvision and timm without importing either.

A helper process, `engine.train.models.catalog_process`, writes the list of each installed version to the user's cache
once. The command line and the preflight use this module.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from typing import Annotated, Literal

from engine.base.codec import ENTRIES, Count, FileRecord, Number, Positive, Record, Side, find_user_record
from engine.base.errors import UsageError, did_you_mean
from engine.base.files import cache_folder
from engine.base.libraries import cached_listing, listing_name
from engine.config.data_sections import Fit, Interpolation
from engine.config.training_sections import BUILTIN_MODELS, ModelConfig
from engine.config.user_code import is_user_code

ModelSource = Literal["user", "builtin", "torchvision", "timm"]
# In the search order of model.source=auto.
MODEL_SOURCES: tuple[ModelSource, ...] = ("builtin", "torchvision", "timm")
_HELPER_MODULE = "engine.train.models.catalog_process"


class CatalogModel(Record, frozen=True, kw_only=True):
    """A model of one of `MODEL_SOURCES`. `weights` are the names of its pretrained weights, the default first.
    `parameters` is the count of the default model, and `top1` the ImageNet accuracy of these weights in percent, both
    if the library reports them."""

    source: str
    name: str
    parameters: Count | None = None
    weights: tuple[str, ...] = ()
    top1: Number | None = None


class PretrainedInput(Record, frozen=True, kw_only=True):
    """The input transform of pretrained weights: `transforms()` of torchvision's, the data config of timm's.

    `image_size` is the size in training. In evaluation, the shorter edge (`fit` crop) or both edges (squash) are
    resized to `val_resize`, and the center is cropped to `val_crop`. `crop_ratio` is `val_crop` / `val_resize`, which
    timm calls crop_pct.
    """

    weights: str
    image_size: Side
    val_crop: Side
    val_resize: Side
    crop_ratio: Positive
    fit: Fit
    interpolation: Interpolation
    mean: tuple[Number, Number, Number]
    std: tuple[Positive, Positive, Positive]

    def resize_for(self, crop: int) -> int:
        """Return the resize before a crop of another size, with the same ratio, as timm computes it."""
        if crop == self.val_crop:
            return self.val_resize
        # 224 / (224 / 232) may be less than 232.
        return max(crop, math.floor(crop / self.crop_ratio + 1e-9))


class ModelListing(FileRecord, frozen=True, kw_only=True):
    """The classification models of one installed version of a library, in the user's cache. `inputs` are the input
    transforms of pretrained weights by the model name that selects them."""

    models: Annotated[tuple[CatalogModel, ...], ENTRIES]
    inputs: Annotated[dict[str, PretrainedInput], ENTRIES]


def resolve_model_source(model: ModelConfig) -> ModelSource:
    """Return the source of a model. With `auto` it is the first of `MODEL_SOURCES` that has the name.

    The name of user code (`module:name`) is not checked. Raises UsageError if no model has this name.
    """
    if is_user_code(model.name) and model.source == "auto":
        return "user"
    candidates, unavailable = list[str](), ""
    for source in MODEL_SOURCES if model.source == "auto" else (model.source,):
        try:
            names = model_names(source)
        except UsageError as error:
            if source in (model.source, "torchvision"):
                raise
            unavailable = f" ({error.problems[0].message})"
            continue
        if model.name in names:
            return source
        candidates += names
    prefix = "no model" if model.source == "auto" else f"no model of {model.source}"
    hint = did_you_mean(model.name, candidates)
    reason = f"{prefix} is named {model.name!r}; list them with `gputrain models`{hint}{unavailable}"
    raise UsageError.one("model.name", reason, code="unknown-value")


def model_names(source: str) -> list[str]:
    """Return the valid values of `model.name` for a source. Raises UsageError if its library is missing or broken."""
    if source == "builtin":
        return list(BUILTIN_MODELS)
    models = read_listing(source).models
    if source == "timm":
        # timm selects weights by a tag after a dot.
        return [model.name for model in models] + [
            f"{model.name}.{tag}" for model in models for tag in model.weights if tag
        ]
    return [model.name for model in models]


def cached_model_names() -> list[str]:
    """Return the names of the built-in models and of those in the user's cache. It starts no process."""
    names = list(BUILTIN_MODELS)
    for source in MODEL_SOURCES[1:]:
        cached = find_user_record(cache_folder(), listing_name("models", source), ModelListing)
        names += [] if cached is None else [model.name for model in cached.models]
    return list(dict.fromkeys(names))


def read_listing(source: str) -> ModelListing:
    """Return the models of torchvision or timm from the cache, else from a helper process.

    Raises UsageError if the library is missing or broken."""
    return cached_listing("models", source, "model.source", ModelListing, _HELPER_MODULE, source)


def builtin_models() -> list[CatalogModel]:
    return [CatalogModel(source="builtin", name=name) for name in BUILTIN_MODELS]


def filter_models(models: Sequence[CatalogModel], query: str | None) -> list[CatalogModel]:
    """Return the models whose name contains `query` or matches it as a pattern with `*`, `?` or `[…]`,
    case-insensitively."""
    if not query:
        return list(models)
    pattern = query.lower() if any(sign in query for sign in "*?[") else f"*{query.lower()}*"
    return [model for model in models if fnmatch.fnmatchcase(model.name.lower(), pattern)]
