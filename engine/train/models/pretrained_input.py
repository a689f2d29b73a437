"""The input transform that pretrained weights bring along, as defaults of the input keys of section `data`.

`engine.jobs.launch.preflight` and `engine.train.models.summary` fill a config with it before the dataset is opened;
from then on the config, and the checkpoint of the run, hold the values. The transforms come from the catalog
(`engine.train.models.catalog`), so this module imports neither torch nor a model library.
"""

from __future__ import annotations

from typing import Any

from engine.config.data_sections import ENCODED_DATASETS
from engine.config.schema import Config
from engine.config.training_sections import BUILTIN_MODELS, ModelConfig
from engine.config.user_code import is_user_code
from engine.train.data.sources.base import ImageFormat, ItemFormat
from engine.train.data.sources.open import expected_input_format
from engine.train.models.catalog import PretrainedInput, model_names, read_listing

# The keys of section `data` that pretrained weights supply where they are not set.
INPUT_KEYS = ("image_size", "val_crop", "val_resize", "fit", "interpolation", "mean", "std")


def find_pretrained_input(model: ModelConfig) -> PretrainedInput | None:
    """Return the input transform of the library's pretrained weights.

    None if the model does not use such weights, or if they have no transform for square images. Raises UsageError if
    the library is missing or broken."""
    is_builtin = model.source in ("auto", "builtin") and model.name in BUILTIN_MODELS
    if model.weights != "pretrained" or is_builtin or is_user_code(model.name):
        return None
    source = model.source
    if source == "auto":
        source = "torchvision" if model.name in model_names("torchvision") else "timm"
    return read_listing(source).inputs.get(model.name)


def with_pretrained_input(
    config: Config, pretrained: PretrainedInput | None, items: ItemFormat | None = None
) -> Config:
    """Set the input keys that are not set to those of pretrained weights. `items` describes those of a user dataset.

    Images of a dataset with a size of its own, such as CIFAR-10, keep it, and only their normalization is that of the
    weights. With another `data.image_size`, the evaluation crops that size with the same ratio."""
    if pretrained is None or (items is not None and items.is_float):
        return config
    data, values = config.data, dict[str, Any]()
    has_own_size = not (data.dataset in ENCODED_DATASETS or is_user_code(data.dataset))
    if items is not None and items.size is not None:
        has_own_size = True
    if not has_own_size:
        crop = data.val_crop or data.image_size or pretrained.val_crop
        values |= {"val_crop": crop, "interpolation": pretrained.interpolation}
        if not data.size_schedule:
            values["image_size"] = pretrained.image_size
        # A user who chooses how images become square also chooses what is cropped.
        if data.fit in (None, pretrained.fit):
            values |= {"fit": pretrained.fit, "val_resize": pretrained.resize_for(crop)}
    channels = data.channels or (items.channels if items is not None else expected_input_format(config).channels)
    for name in ("mean", "std"):
        channel_values = getattr(pretrained, name)
        # As for other grayscale images: the mean over the channels.
        values[name] = channel_values if channels == 3 else (sum(channel_values) / 3,)
    unset = {key: value for key, value in values.items() if getattr(data, key) is None}
    return config.model_copy(update={"data": data.model_copy(update=unset)})


def fill_input_keys(config: Config) -> tuple[Config, PretrainedInput | None]:
    """Set the input keys that are not set to those of the model's pretrained weights, which are returned, too.

    May load an item of a user dataset. Raises UsageError."""
    pretrained, items = find_pretrained_input(config.model), None
    if pretrained is not None and needs_items(config):
        # It imports torch.
        from engine.train.data.sources.user_dataset import first_item_format

        items = first_item_format(config.data, config.run)
    return with_pretrained_input(config, pretrained, items), pretrained


def needs_items(config: Config) -> bool:
    """Whether only the items of a user dataset show which of its input keys pretrained weights may supply."""
    data = config.data
    return is_user_code(data.dataset) and (data.image_size is None or None in (data.mean, data.std))


def describe_pretrained_input(config: Config, pretrained: PretrainedInput | None) -> str:
    """Return what of a filled config is that of its pretrained weights, as a clause; "" without such weights."""
    if pretrained is None:
        return ""
    data = config.data
    own_values = with_pretrained_input(
        config.model_copy(update={"data": data.model_copy(update={"mean": None, "std": None})}), pretrained
    ).data
    is_theirs = (data.mean, data.std) == (own_values.mean, own_values.std)
    stats = "mean/std of" if is_theirs else "not the mean/std of"
    own_format = ImageFormat(
        size=pretrained.image_size,
        channels=3,
        mean=pretrained.mean,
        std=pretrained.std,
        val_size=pretrained.val_crop,
        val_resize=pretrained.val_resize,
        fit=pretrained.fit,
        interpolation=pretrained.interpolation,
    )
    theirs = own_format.describe()
    sizes = "" if expected_input_format(config).describe() == theirs else f", whose own input is {theirs}"
    return f"{stats} {pretrained.weights}{sizes}"
