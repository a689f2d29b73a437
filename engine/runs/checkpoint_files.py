"""Checkpoint files of a run folder, without importing torch: names, order and checksum.

`engine.train.loop.checkpoint` defines their content, writes and reads them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from engine.base.codec import format_problem
from engine.base.errors import CodedError, UsageError
from engine.base.files import expand_user, is_file, open_regular_file
from engine.runs.folder import RunFolder

CHECKPOINT_FORMAT = 1
CHECKPOINT_KEYS = {
    *("config", "classes", "image_format", "tf32", "model", "ema", "optimizer", "scaler", "plateau"),
    *("early_stop", "epoch", "step_in_epoch", "step", "skipped", "consecutive_skipped", "global_batch", "images"),
    *("fingerprints", "best_epoch", "best_accuracy", "ranks"),
}
# Those that tell a checkpoint of gputrain, of any format, from one of another program.
_IDENTIFYING_KEYS = {"format", "config", "classes", "image_format", "model"}
CHECKSUM_PREFIX = b"gputrain sha256 "
COMMENT_BYTES = len(CHECKSUM_PREFIX) + hashlib.sha256().digest_size * 2
_READ_CHUNK_BYTES = 1 << 20


class DamagedCheckpointError(CodedError):
    """A checkpoint file is damaged. The message follows the file name in a sentence."""

    code = "damaged"


def checkpoints_by_step(folder: Path) -> list[Path]:
    """Return the `step-N.pt` files, newest first."""
    named = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name)]
    return sorted(named, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return every checkpoint that a run can resume from, newest first.

    Hard links to the same file are listed once. On a file system without hard links `last.pt` and `best.pt` are copies,
    and a copy can be intact when the original is damaged.
    """
    steps = checkpoints_by_step(folder)
    checkpoints, seen = [], set()
    for path in (*steps[:1], folder / "last.pt", *steps[1:], folder / "best.pt"):
        with suppress(OSError):
            status = path.stat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                checkpoints.append(path)
    return checkpoints


def find_checkpoint(folder: RunFolder, which: str) -> Path:
    """Return the path of the checkpoint `which`: "best" (or the last one before the first evaluation), "last", or a
    file. Raises UsageError if there is none."""
    names = {"best": ("best.pt", "last.pt"), "last": ("last.pt",)}
    if which not in names:
        path = expand_user(which)
        if not is_file(path):
            raise UsageError.one("--checkpoint", f"{which} is not a file; use best, last or a file", code="not-a-file")
        # A link that the user names is followed, one in a run folder is not.
        return path.resolve()
    for name in names[which]:
        if is_file(folder.checkpoints / name):
            return folder.checkpoints / name
    if is_file(folder.command):
        reason = "is the run of a command, which has no checkpoint of gputrain; name a run of `gputrain run CONFIG`"
        raise UsageError.one(folder.name, reason, code="no-checkpoint")
    raise UsageError.one(
        folder.name, "has no checkpoint yet; the first is saved at the end of an epoch", code="no-checkpoint"
    )


def read_digest(path: Path) -> str:
    """Return the SHA-256 in the archive comment of a checkpoint, without reading the rest of the file.

    Raises DamagedCheckpointError, and OSError if the file cannot be read.
    """
    with open_regular_file(path) as file:
        return _stated_checksum(file)[len(CHECKSUM_PREFIX) :].decode(errors="replace")


def _stated_checksum(file: BinaryIO) -> bytes:
    file.seek(max(os.fstat(file.fileno()).st_size - COMMENT_BYTES, 0))
    comment = file.read(COMMENT_BYTES)
    if not comment.startswith(CHECKSUM_PREFIX):
        raise DamagedCheckpointError("is truncated or not a gputrain checkpoint")
    return comment


def verify_checksum(file: BinaryIO) -> None:
    """Check the SHA-256 checksum at the end of an open file.

    Raises DamagedCheckpointError if it does not match, OSError if the file cannot be read."""
    data_bytes = os.fstat(file.fileno()).st_size - COMMENT_BYTES
    # First, because hashing a large file takes minutes.
    comment = _stated_checksum(file)
    checksum, remaining_bytes = hashlib.sha256(), data_bytes
    file.seek(0)
    while remaining_bytes > 0 and (block := file.read(min(_READ_CHUNK_BYTES, remaining_bytes))):
        checksum.update(block)
        remaining_bytes -= len(block)
    if comment != CHECKSUM_PREFIX + checksum.hexdigest().encode():
        raise DamagedCheckpointError("is damaged: its checksum does not match")


def check_expansion(file: BinaryIO) -> None:
    """Check that an archive of `torch.save` needs no more memory than its own size.

    `torch.save` never compresses, but `torch.load` reads compressed and overlapping records: 260 KB can become 270 MB.
    If it maps a file into memory, it takes a compressed record for its content. Raises DamagedCheckpointError. A file
    that is no ZIP archive passes.
    """
    try:
        with ZipFile(file) as archive:
            content_bytes = sum(record.file_size for record in archive.infolist())
            compressed = any(record.compress_type != ZIP_STORED for record in archive.infolist())
    except BadZipFile:
        return
    if compressed or content_bytes > os.fstat(file.fileno()).st_size:
        raise DamagedCheckpointError("contains compressed or overlapping data, which torch.save does not write")


def is_checkpoint(content: object) -> bool:
    """Whether the content of a file is that of a checkpoint of gputrain, of any format."""
    return isinstance(content, Mapping) and content.keys() >= _IDENTIFYING_KEYS


def check_format(path: Path, found: object) -> None:
    """Raise UsageError unless `found` is the format of a checkpoint that this gputrain reads."""
    if (problem := format_problem(found, CHECKPOINT_FORMAT)) is not None:
        advice = "use the version of gputrain that wrote it"
        raise UsageError.one(str(path), problem, advice, code="wrong-version")
