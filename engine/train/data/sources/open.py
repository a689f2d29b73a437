"""Open the source of a config's dataset, which may be a published archive that is downloaded first.

The addresses of archives are fixed here, so a config that somebody else wrote cannot name another one.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.base.errors import UsageError
from engine.config.data_sections import ENCODED_DATASETS, DataConfig
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.train.data.sources import csv_source, folder, webdataset
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.builtin import (
    DIGITS_FORMAT,
    TORCHVISION_DATASETS,
    check_torchvision_files,
    open_digits,
    open_fake,
    open_torchvision_dataset,
)
from engine.train.data.sources.formats import ImageFormat, format_from_config

# A new kind of source is one entry here, and its name in `engine.config.data_sections` (`DatasetName`).
OPENERS: dict[str, Callable[[Config], ImageSource]] = {
    "csv": csv_source.open_csv,
    "digits": lambda config: open_digits(config.data, config.run.seed),
    "fake": lambda config: open_fake(config.data, config.run.seed),
    "folder": folder.open_folder,
    "webdataset": webdataset.open_webdataset,
    **dict.fromkeys(TORCHVISION_DATASETS, lambda config: open_torchvision_dataset(config.data, config.run.seed)),
}
CLASS_NAME_READERS: dict[str, Callable[[Config], tuple[str, ...]]] = {
    "csv": csv_source.class_names,
    "folder": folder.class_names,
    "webdataset": webdataset.class_names,
}


def open_source(config: Config) -> ImageSource:
    """Open the dataset of a config. Raises UsageError if it is missing or unusable."""
    if is_user_code(config.data.dataset):
        # It imports torch.
        from engine.train.data.sources.user_dataset import open_user_dataset

        return open_user_dataset(config.data, config.run)
    return OPENERS[config.data.dataset](config)


def read_class_names(config: Config) -> tuple[str, ...]:
    """Return the class names of one of the ENCODED_DATASETS without opening any image. Raises UsageError."""
    return CLASS_NAME_READERS[config.data.dataset](config)


def expected_input_format(config: Config) -> ImageFormat:
    """Return the expected input format from the config alone, without opening the dataset."""
    data = config.data
    if data.dataset in ENCODED_DATASETS or is_user_code(data.dataset):
        base = ImageFormat(folder.DEFAULT_IMAGE_SIZE, 3, (), ())
    elif data.dataset == "fake":
        base = open_fake(data, config.run.seed).format
    else:
        base = DIGITS_FORMAT if data.dataset == "digits" else TORCHVISION_DATASETS[data.dataset].format
    return format_from_config(data, base)


def _lacks_archive(data: DataConfig) -> bool:
    return data.dataset == "folder" and data.archive is not None and not Path(str(data.path)).exists()


def open_source_for_preflight(config: Config) -> ImageSource | None:
    """Open the dataset before the ranks start if that needs no torch, so that a folder is scanned once for all ranks.

    Returns None for torchvision datasets, after checking that their files exist, for user datasets, which
    `engine.train.data.inspection_process.check_user_data_code` checks, and for a folder that the run downloads. Raises
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


@dataclass(frozen=True)
class Archive:
    """A published archive: its address, its size as text, and the folder in it that has the class folders."""

    url: str
    size: str
    folder: str


ARCHIVES = {
    # https://www.tensorflow.org/datasets/catalog/tf_flowers
    "flower-photos": Archive(
        "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz",
        "218 MiB",
        "flower_photos",
    )
}


def open_downloaded_source(config: Config, notify: Callable[[str], None]) -> ImageSource | None:
    """Download the dataset of a run if it is missing, and open it like `open_source_for_preflight`.

    `notify` receives what is downloaded. Raises UsageError.
    """
    if config.data.download and _lacks_archive(config.data):
        archive = ARCHIVES[str(config.data.archive)]
        notify(f"downloading {archive.url} ({archive.size})")
        download_archive(archive, Path(str(config.data.path)), config.data.checksum)
    return open_source_for_preflight(config)


def download_archive(archive: Archive, target: Path, checksum: str | None) -> None:
    """Download an archive and unpack its class folders to `target`, which appears when it is complete.

    `checksum` is the SHA-256 of the archive in hexadecimal digits. Raises UsageError with what to do.
    """
    from torchvision.datasets.utils import download_url, extract_archive

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A progress bar of torchvision would end up in the log of the run.
        with TemporaryDirectory(dir=target.parent, prefix=".download-") as staging, redirect_stderr(io.StringIO()):
            download_url(archive.url, staging, "archive.tgz")
            with Path(staging, "archive.tgz").open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if checksum is not None and actual != checksum.lower():
                reason = f"the SHA-256 of {archive.url} is {actual}, not {checksum}"
                raise UsageError.one("data.checksum", reason, code="checksum-mismatch")
            extract_archive(f"{staging}/archive.tgz", f"{staging}/unpacked")
            # Another process may have downloaded it meanwhile.
            if not target.exists():
                Path(staging, "unpacked", archive.folder).rename(target)
    except (OSError, HTTPException, RuntimeError, tarfile.TarError, EOFError, zlib.error) as error:
        reason = f"{archive.url} cannot be downloaded to {target}: {error}"
        advice = f"check the network and the disk and start again, or unpack the archive to {target}"
        raise UsageError.one("data.download", reason, advice, code="download-failed") from error
