"""Opens the dataset that a config names."""

from __future__ import annotations

from engine.config.schema import Config
from engine.config.user_code import is_own
from engine.data.sources.base import Source
from engine.data.sources.builtin import IMAGE_SETS, check_image_set, open_digits, open_fake, open_image_set


def open_source(config: Config) -> Source:
    """The images that a config asks for. Raises UsageError."""
    data, seed = config.data, config.run.seed
    if data.dataset == "digits":
        return open_digits(data, seed)
    if data.dataset == "fake":
        return open_fake(data, seed)
    if data.dataset == "folder":
        from engine.data.sources.folder import open_folder

        return open_folder(data, seed)
    if is_own(data.dataset):
        from engine.data.sources.user_dataset import open_own

        return open_own(data, config.run.code, seed)
    return open_image_set(data)


def open_early(config: Config) -> Source | None:
    """The source where it can be had without torch, to find its faults before ranks are started and to look into a
    folder once for all of them; None for torchvision's sets, of which only the files are looked for, and for the user's
    own data, at which `engine.data.inspection_process.check_own_data` looks."""
    if is_own(config.data.dataset):
        return None
    if config.data.dataset in IMAGE_SETS:
        check_image_set(config.data)
        return None
    return open_source(config)
