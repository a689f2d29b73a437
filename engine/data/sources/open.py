"""Open the source of a config's dataset."""

from __future__ import annotations

from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.sources.base import ImageSource
from engine.data.sources.builtin import (
    TORCHVISION_DATASETS,
    check_torchvision_files,
    open_digits,
    open_fake,
    open_torchvision_dataset,
)


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
    if is_user_code(data.dataset):
        from engine.data.sources.user_dataset import open_user_dataset

        return open_user_dataset(data, config.run)
    return open_torchvision_dataset(data)


def open_source_for_preflight(config: Config) -> ImageSource | None:
    """Open the dataset before the ranks start if that needs no torch, so that a folder is scanned once for all ranks.

    Returns None for torchvision datasets, after checking that their files exist, and for user datasets, which
    `engine.data.inspection_process.check_user_data_code` checks. Raises UsageError.
    """
    if is_user_code(config.data.dataset):
        return None
    if config.data.dataset in TORCHVISION_DATASETS:
        check_torchvision_files(config.data)
        return None
    return open_source(config)
