"""The input transform that pretrained weights bring along, as defaults of the input keys of section `data`.

`engine.launch.preflight` and `engine.models.summary` fill a config with it before the dataset is opened; from then on
the config, and the checkpoint of the run, hold the values. The transforms come from the catalog
(`engine.models.catalog`), so this module imports neither torch nor a model library.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from engine.config.data_sections import ENCODED_DATASETS, Fit, Interpolation
from engine.config.schema import Config
from engine.config.training_sections import BUILTIN_MODELS, ModelConfig
from engine.config.user_code import is_user_code
from engine.data.sources.base import ImageFormat, ItemFormat
from engine.data.sources.formats import Positive, Side
from engine.data.sources.open import expected_input_format
from engine.models.catalog import model_names, read_listing
from engine.utils.codec import ENTRIES, FileRecord, Number, Record

# The keys of section `data` that pretrained weights supply where they are not set.
INPUT_KEYS = ("image_size", "val_crop", "val_resize", "fit", "interpolation", "mean", "std")


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

    @property
    def image_format(self) -> ImageFormat:
        """The format of the images for which the weights were trained."""
        return ImageFormat(
            size=self.image_size,
            channels=3,
            mean=self.mean,
            std=self.std,
            val_size=self.val_crop,
            val_resize=self.val_resize,
            fit=self.fit,
            interpolation=self.interpolation,
        )

    def resize_for(self, crop: int) -> int:
        """Return the resize before a crop of another size, with the same ratio, as timm computes it."""
        if crop == self.val_crop:
            return self.val_resize
        # 224 / (224 / 232) may be less than 232.
        return max(crop, math.floor(crop / self.crop_ratio + 1e-9))


class InputListing(FileRecord, frozen=True, kw_only=True):
    """The input transforms of pretrained weights by model name, in the user's cache. See `engine.models.catalog`."""

    inputs: Annotated[dict[str, PretrainedInput], ENTRIES]


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
    return read_listing(source, "inputs", InputListing).inputs.get(model.name)


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
        from engine.data.sources.user_dataset import first_item_format

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
    theirs = pretrained.image_format.describe()
    sizes = "" if expected_input_format(config).describe() == theirs else f", whose own input is {theirs}"
    return f"{stats} {pretrained.weights}{sizes}"
