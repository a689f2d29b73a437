"""Checkpoint files: all that training needs to go on as if it had not been interrupted, in one file each.

A checkpoint is what `torch.save` writes, a ZIP archive, with the SHA-256 of everything before it as the archive's
comment (APPNOTE.TXT 4.3.16). So `torch.load(path, weights_only=True)` reads it as it is, and a file that was cut or
changed at any place is known. Format 3 is a dict of plain values and tensors:

    format, config, classes         what was trained, on what
    image_format                    size, channels, mean and std of the images that the model takes
    model, optimizer, scaler        their state dicts, the model's in float32 and without any wrapper's prefix
    ema, plateau                    those of the averaged weights, None without them, and of schedule plateau
    epoch, batch, step              the position: `batch` batches of `epoch` are done, `step` steps in all
    skipped, skipped_in_row         steps left out because of numbers that are not finite, so far and lately
    global_batch                    images of all ranks in one of those batches
    images                          for training and for validation
    best_epoch, best_accuracy       of the evaluations so far, 0 and -1.0 before the first
    ranks                           for each rank: its random number generators, its running sums of the epoch, and
                                    the losses that no `step` event has told yet

In a run's folder each is called by its step, `step-00000044.pt`; `last.pt` and `best.pt` are second names of two.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from engine.runs.checkpoint_files import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_KEYS,
    CHECKSUM_PREFIX,
    COMMENT_BYTES,
    DamagedCheckpointError,
    checkpoints_by_step,
    list_checkpoints,
    verify_checksum,
)
from engine.utils.errors import UsageError
from engine.utils.files import fsync_folder, link_file, replace_file


class _HashingWriter:
    """A file that is written from front to back, and the checksum of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tail = b""
        self.checksum = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """The last two bytes are held back: of an archive they are the length of its comment."""
        view = memoryview(data).cast("B")
        if len(view) < 2:
            held = self._tail + bytes(view)
            self._write_hashed(held[:-2])
            self._tail = held[-2:]
        else:
            self._write_hashed(self._tail)
            self._write_hashed(view[:-2])
            self._tail = bytes(view[-2:])
        return len(view)

    def _write_hashed(self, data: bytes | memoryview) -> None:
        self.checksum.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def close_with_checksum(self) -> None:
        self._write_hashed(struct.pack("<H", COMMENT_BYTES))
        self._file.write(CHECKSUM_PREFIX + self.checksum.hexdigest().encode())


def save_checkpoint(state: Mapping[str, Any], folder: Path, *, best: bool, keep: int) -> Path:
    """Write the checkpoint of `state["step"]`, which is the last now, and the best where it is that; then drop all but
    the newest `keep`. It is on the disk on return, and those before are left alone until then. Raises OSError."""

    def write(file: BinaryIO) -> None:
        hashed = _HashingWriter(file)
        try:
            torch.save({"format": CHECKPOINT_FORMAT, **state}, cast(Any, hashed))
        except RuntimeError as error:
            # torch's writer has words of its own for a disk that takes no more.
            raise hashed.error or error from None
        hashed.close_with_checksum()

    path = folder / f"step-{state['step']:08d}.pt"
    folder.mkdir(exist_ok=True)
    replace_file(path, write, durable=True)
    # First: where the file system has no hard links, the second names are copies and take room.
    for old in checkpoints_by_step(folder)[keep:]:
        old.unlink(missing_ok=True)
    link_file(path, folder / "last.pt")
    if best:
        link_file(path, folder / "best.pt")
    fsync_folder(folder)
    return path


def load_newest(folder: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """The newest checkpoint that is what was written, None and nothing where there is none at all; and what is wrong
    with those that are newer. These get another name, so that they are not counted again. Raises UsageError where none
    is sound, where one cannot be read or is of another format."""
    damaged: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return path, load_checkpoint(path), damaged
        except DamagedCheckpointError as error:
            damaged.append(f"{path.name} {error}")
            with suppress(OSError):
                path.rename(path.with_name(f"{path.name}.damaged"))
    damaged += [f"{path.name} was found before" for path in folder.glob("*.damaged") if not damaged]
    if damaged:
        raise UsageError.one(
            str(folder), f"no checkpoint is sound: {'; '.join(damaged)}; start the run anew under another name"
        )
    return None, {}, damaged


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Raises DamagedCheckpointError, and UsageError where the file is of another format or cannot be read now."""
    try:
        verify_checksum(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = state["format"]
    except DamagedCheckpointError:
        raise
    except (OSError, MemoryError) as error:
        # Of the machine, not of the file: it may be read another time.
        raise UsageError.one(str(path), f"cannot be read now: {error or 'there is too little memory'}") from error
    except Exception as error:
        # A checksum can be made for anything, and what is no checkpoint brings any error out of the unpickler.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DamagedCheckpointError(f"is no checkpoint of gputrain: {reason}") from error
    if found != CHECKPOINT_FORMAT:
        raise UsageError.one(
            str(path), f"has format {found}, and this gputrain reads format {CHECKPOINT_FORMAT}; take the one that fits"
        )
    if missing := CHECKPOINT_KEYS - state.keys():
        raise DamagedCheckpointError(f"is no checkpoint of gputrain: it lacks {', '.join(sorted(missing))}")
    return state
