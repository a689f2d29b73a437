"""Download the archive of a published image folder, continue an interrupted download, and unpack it.

`engine.launch` calls `open_downloaded_source` for a run. The addresses are fixed here, so a config that somebody else
wrote cannot name another one. A killed download leaves the file `.NAME.part`, which the next one continues, and perhaps
the folder `.NAME.tmp`, which the next one deletes.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import http.client
import os
import shutil
import ssl
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path, PurePosixPath

from engine.config.schema import Config
from engine.data.sources.base import ImageSource
from engine.data.sources.open import is_downloaded_later, open_source_for_preflight
from engine.utils.errors import UsageError
from engine.utils.units import format_bytes

TIMEOUT_SECONDS = 60.0  # without a byte from the server
CHUNK_BYTES = 1 << 20
# An archive is compressed: its size does not bound what it unpacks to.
MAX_UNPACKED_BYTES = 1 << 30
MAX_MEMBERS = 20_000
PROGRESS_STEPS = 10


@dataclass(frozen=True)
class Archive:
    """A published archive: its address, its size in bytes, and the folder in it that has the class folders."""

    url: str
    size_bytes: int
    folder: str


ARCHIVES = {
    # https://www.tensorflow.org/datasets/catalog/tf_flowers
    "flower-photos": Archive(
        "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz",
        228_813_984,
        "flower_photos",
    )
}


def open_downloaded_source(config: Config, notify: Callable[[str], None]) -> ImageSource | None:
    """Download the dataset of a run if it is missing, and open it like `open_source_for_preflight`.

    `notify` receives the progress. Raises UsageError.
    """
    if is_downloaded_later(config.data):
        archive = ARCHIVES[str(config.data.archive)]
        download_archive(archive, Path(str(config.data.path)), config.data.checksum, notify)
    return open_source_for_preflight(config)


def download_archive(archive: Archive, folder: Path, checksum: str | None, notify: Callable[[str], None]) -> None:
    """Download an archive and unpack its class folders to `folder`, which must not exist.

    `checksum` is the SHA-256 of the archive in hexadecimal digits. Another process that downloads to the same folder is
    waited for. Raises UsageError with what to do; what was downloaded so far remains for the next attempt.
    """
    partial = folder.with_name(f".{folder.name}.part")
    is_new = not folder.parent.exists()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked_file(partial) as file:
            if folder.exists():
                # The process that held the lock has downloaded it.
                partial.unlink(missing_ok=True)
                return
            _download(archive, file, notify)
            _verify(archive, file, checksum, partial)
            _unpack(archive, file, folder)
            partial.unlink(missing_ok=True)
    except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError.one(
            "data.download",
            f"{archive.url} cannot be downloaded: {reason}",
            f"check the network and start again, which continues, or unpack the archive to {folder}",
            code="download-failed",
        ) from error
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        partial.unlink(missing_ok=True)
        raise UsageError.one(
            "data.download", f"{archive.url} is not a valid archive: {error}", code="damaged"
        ) from error
    except OSError as error:
        reason = f"{folder} cannot be written to: {error.strerror or error}"
        if error.errno == errno.ENOSPC:
            raise UsageError.one("data.path", reason, "free space and start again", code="disk-full") from error
        raise UsageError.one("data.path", reason, "choose another data.path", code="not-writable") from error
    finally:
        if is_new:
            with suppress(OSError):
                # Only an empty folder, after an error.
                folder.parent.rmdir()


@contextmanager
def _locked_file(path: Path) -> Iterator[BufferedRandom]:
    """Open a file for reading and appending, and hold a lock on it. Raises OSError for a link."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                try:
                    yield file
                finally:
                    if path.exists() and not path.stat().st_size:
                        path.unlink()
                return
        # The process that held the lock has deleted the file.


def _download(archive: Archive, file: BufferedRandom, notify: Callable[[str], None]) -> None:
    """Append what is missing of an archive to a file. Raises OSError, URLError and HTTPException."""
    start = file.seek(0, os.SEEK_END)
    if start >= archive.size_bytes:
        return
    request = urllib.request.Request(archive.url, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - the addresses are fixed
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0
        file.truncate(start)
        file.seek(start)
        total = format_bytes(archive.size_bytes)
        notify(f"{'continuing' if start else 'downloading'} {archive.url} ({total})")
        done, shown = start, start * PROGRESS_STEPS // archive.size_bytes
        # One byte more than expected shows that the archive is another one.
        while chunk := response.read(min(CHUNK_BYTES, archive.size_bytes + 1 - done)):
            file.write(chunk)
            done += len(chunk)
            step = done * PROGRESS_STEPS // archive.size_bytes
            if step > shown:
                shown = step
                notify(f"downloaded {format_bytes(done)} of {total}")
    file.flush()


def _verify(archive: Archive, file: BufferedRandom, checksum: str | None, partial: Path) -> None:
    """Check size and SHA-256 of a downloaded archive. Raises UsageError; a wrong archive is deleted."""
    size = file.seek(0, os.SEEK_END)
    if size < archive.size_bytes:
        raise UsageError.one(
            "data.download",
            f"the connection ended after {format_bytes(size)} of {format_bytes(archive.size_bytes)}",
            "start again, which continues",
            code="download-failed",
        )
    if size > archive.size_bytes:
        partial.unlink()
        raise UsageError.one(
            "data.download", f"{archive.url} has another size than {archive.size_bytes:,} bytes", code="data-changed"
        )
    file.seek(0)
    if checksum is not None and (actual := hashlib.file_digest(file, "sha256").hexdigest()) != checksum.lower():
        partial.unlink()
        raise UsageError.one(
            "data.checksum", f"the SHA-256 of {archive.url} is {actual}, not {checksum}", code="checksum-mismatch"
        )


def _unpack(archive: Archive, file: BufferedRandom, folder: Path) -> None:
    """Unpack the class folders to `folder`, which appears at once. Raises OSError and TarError."""
    # The lock on the archive lets no other process unpack.
    staging = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    file.seek(0)
    try:
        with gzip.GzipFile(fileobj=file) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            unpacked = 0
            for number, member in enumerate(tar):
                unpacked += member.size
                if number >= MAX_MEMBERS or unpacked > MAX_UNPACKED_BYTES:
                    raise tarfile.ReadError(f"it has more than {MAX_MEMBERS:,} files or {MAX_UNPACKED_BYTES >> 30} GiB")
                path = PurePosixPath(member.name)
                if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
                    raise tarfile.ReadError(f"{member.name} is no file or folder in it")
                if path.parts[:1] == (archive.folder,):
                    tar.extract(member, staging, filter="data")
            # The CRC is at the end of the stream, behind the padding of the archive.
            while stream.read(CHUNK_BYTES):
                pass
        if not (staging / archive.folder).is_dir():
            raise tarfile.ReadError(f"it has no folder {archive.folder}")
        (staging / archive.folder).rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
