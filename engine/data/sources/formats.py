"""The image format of a config: size, channels, mean and standard deviation."""

from __future__ import annotations

from dataclasses import replace

from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.sources.base import ImageFormat, ImageSource
from engine.data.sources.builtin import DIGITS_FORMAT, TORCHVISION_DATASETS, open_fake


def expected_input_format(config: Config) -> ImageFormat:
    """What the images will look like, as far as that is known without looking at them: nothing is opened."""
    data = config.data
    if data.dataset == "folder" or is_user_code(data.dataset):
        from engine.data.sources.folder import DEFAULT_IMAGE_SIZE

        own = ImageFormat(DEFAULT_IMAGE_SIZE, 3, (), ())
    elif data.dataset == "fake":
        own = open_fake(data, config.run.seed).format
    else:
        own = DIGITS_FORMAT if data.dataset == "digits" else TORCHVISION_DATASETS[data.dataset].format
    return replace(own, size=data.image_size or own.size, channels=data.channels or own.channels)


def model_input_format(config: Config, source: ImageSource) -> ImageFormat:
    """What the images look like to the model: the source's own format, but for what the config says otherwise."""
    data, own = config.data, source.format
    channels = data.channels or own.channels
    mean, std = own.mean, own.std
    if channels != own.channels:
        # Grey copied to three channels keeps its statistics; colour made grey has about the mean of them.
        mean = mean * 3 if channels == 3 else (sum(mean) / 3,)
        std = std * 3 if channels == 3 else (sum(std) / 3,)
    return replace(
        own, size=data.image_size or own.size, channels=channels, mean=data.mean or mean, std=data.std or std
    )
