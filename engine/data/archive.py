"""Download the archive of a published image folder with torchvision, and unpack it.

`engine.launch` calls `open_downloaded_source` for a run. The addresses are fixed here, so a config that somebody else
wrote cannot name another one.
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

from engine.config.schema import Config
from engine.data.sources.base import ImageSource
from engine.data.sources.open import is_downloaded_later, open_source_for_preflight
from engine.utils.errors import UsageError


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
    if is_downloaded_later(config.data):
        archive = ARCHIVES[str(config.data.archive)]
        notify(f"downloading {archive.url} ({archive.size})")
        download_archive(archive, Path(str(config.data.path)), config.data.checksum)
    return open_source_for_preflight(config)


def download_archive(archive: Archive, folder: Path, checksum: str | None) -> None:
    """Download an archive and unpack its class folders to `folder`, which appears when it is complete.

    `checksum` is the SHA-256 of the archive in hexadecimal digits. Raises UsageError with what to do.
    """
    from torchvision.datasets.utils import download_url, extract_archive

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A progress bar of torchvision would end up in the log of the run.
        with TemporaryDirectory(dir=folder.parent, prefix=".download-") as staging, redirect_stderr(io.StringIO()):
            download_url(archive.url, staging, "archive.tgz")
            with Path(staging, "archive.tgz").open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if checksum is not None and actual != checksum.lower():
                reason = f"the SHA-256 of {archive.url} is {actual}, not {checksum}"
                raise UsageError.one("data.checksum", reason, code="checksum-mismatch")
            extract_archive(f"{staging}/archive.tgz", f"{staging}/unpacked")
            # Another process may have downloaded it meanwhile.
            if not folder.exists():
                Path(staging, "unpacked", archive.folder).rename(folder)
    except (OSError, HTTPException, RuntimeError, tarfile.TarError, EOFError, zlib.error) as error:
        reason = f"{archive.url} cannot be downloaded to {folder}: {error}"
        advice = f"check the network and the disk and start again, or unpack the archive to {folder}"
        raise UsageError.one("data.download", reason, advice, code="download-failed") from error
