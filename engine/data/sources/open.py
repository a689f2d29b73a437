"""Open the source of a config's dataset."""

from __future__ import annotations

from pathlib import Path

from engine.config.data_sections import ENCODED_DATASETS, DataConfig
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.sources.base import ImageSource
from engine.data.sources.builtin import (
    DIGITS_FORMAT,
    TORCHVISION_DATASETS,
    check_torchvision_files,
    open_digits,
    open_fake,
    open_torchvision_dataset,
)
from engine.data.sources.folder import DEFAULT_IMAGE_SIZE
from engine.data.sources.formats import ImageFormat, format_from_config
from engine.utils.errors import UsageError


def open_source(config: Config) -> ImageSource:
    """Open the dataset of a config. Raises UsageError if it is missing or unusable."""
    data, seed = config.data, config.run.seed
    if data.dataset == "digits":
        return open_digits(data, seed)
    if data.dataset == "fake":
        return open_fake(data, seed)
    if data.dataset == "folder":
        from engine.data.sources.folder import open_folder

        return open_folder(data, seed)
    if data.dataset == "webdataset":
        from engine.data.sources.webdataset import open_webdataset

        return open_webdataset(data, seed)
    if is_user_code(data.dataset):
        from engine.data.sources.user_dataset import open_user_dataset

        return open_user_dataset(data, config.run)
    return open_torchvision_dataset(data)


def read_class_names(data: DataConfig) -> tuple[str, ...]:
    """Return the class names of one of the ENCODED_DATASETS without opening any image. Raises UsageError."""
    if data.dataset == "webdataset":
        from engine.data.sources import webdataset

        return webdataset.class_names(data)
    from engine.data.sources.folder import class_names

    return class_names(data)


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


def is_downloaded_later(data: DataConfig) -> bool:
    """Whether a run downloads the folder of the dataset, which is not there yet, see `engine.data.archive`."""
    return data.download and _lacks_archive(data)


def _lacks_archive(data: DataConfig) -> bool:
    return data.dataset == "folder" and data.archive is not None and not Path(str(data.path)).exists()


def open_source_for_preflight(config: Config) -> ImageSource | None:
    """Open the dataset before the ranks start if that needs no torch, so that a folder is scanned once for all ranks.

    Returns None for torchvision datasets, after checking that their files exist, for user datasets, which
    `engine.data.inspection_process.check_user_data_code` checks, and for a folder that the run downloads. Raises
    UsageError.
    """
    data = config.data
    if _lacks_archive(data):
        if data.download:
            return None
        raise UsageError.one(
            "data.path",
            f"{data.path} does not exist",
            f"download {data.archive} with data.download=true, or set data.path (--data-path) to your images",
            code="not-found",
        )
    if is_user_code(config.data.dataset):
        return None
    if config.data.dataset in TORCHVISION_DATASETS:
        check_torchvision_files(config.data)
        return None
    return open_source(config)
