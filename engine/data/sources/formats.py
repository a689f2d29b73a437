"""The input format of the model: size, channels, mean and std from the config and the dataset."""

from __future__ import annotations

from dataclasses import replace

from engine.config.data_sections import ENCODED_DATASETS
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.sources.base import ImageFormat, ImageSource, format_from_config
from engine.data.sources.builtin import DIGITS_FORMAT, TORCHVISION_DATASETS, open_fake
from engine.data.sources.folder import DEFAULT_IMAGE_SIZE


def expected_input_format(config: Config) -> ImageFormat:
    """Return the expected input format from the config alone, without opening the dataset."""
    data = config.data
    if data.dataset in ENCODED_DATASETS or is_user_code(data.dataset):
        base = ImageFormat(DEFAULT_IMAGE_SIZE, 3, (), ())
    elif data.dataset == "fake":
        base = open_fake(data, config.run.seed).format
    else:
        base = DIGITS_FORMAT if data.dataset == "digits" else TORCHVISION_DATASETS[data.dataset].format
    return format_from_config(data, base)


def model_input_format(config: Config, source: ImageSource) -> ImageFormat:
    """Return the input format of the model: the source's format with the overrides of the config."""
    data, base = config.data, source.format
    if base.is_float:
        return base
    channels = data.channels or base.channels
    mean, std = base.mean, base.std
    if channels != base.channels:
        # Grayscale copied to three channels keeps its statistics; those of RGB converted to grayscale are close to the
        # mean over the channels.
        mean = mean * 3 if channels == 3 else (sum(mean) / 3,)
        std = std * 3 if channels == 3 else (sum(std) / 3,)
    return replace(format_from_config(data, base), mean=data.mean or mean, std=data.std or std)
