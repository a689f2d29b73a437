"""Checkpoint files: save, load, verify and rotate them.

`checkpoint_writer` gathers their content and saves it, `resume` loads and restores it. A file holds everything that a
run needs to resume bit-identically.

A checkpoint is the ZIP archive that `torch.save` writes, with the SHA-256 of all preceding bytes as the archive comment
(APPNOTE.TXT 4.3.16). `torch.load(path, weights_only=True)` therefore reads it unchanged, and truncation or any changed
byte is detected. The content is a dict of plain values and tensors:

    format, config, classes         format version, config of the run, class names
    image_format                    the fields of `ImageFormat`
    tf32                            whether float32 math uses TF32
    model, optimizer, scaler        state dicts; the model's in float32 and without the prefix of a wrapper
    ema, plateau                    state dicts of the EMA weights (None without them) and of schedule.name=plateau
    early_stop                      reference and stale epochs of `run.early_stop`
    epoch, step_in_epoch, step      position: `step_in_epoch` steps of `epoch` are done, `step` steps in all
    skipped, consecutive_skipped    steps skipped because of non-finite values: in total, and up to the last step
    global_batch                    global batch size, in images
    images                          number of training and validation images
    fingerprints                    that of the images of each part, see `engine.train.data.sources.base`
    best_epoch, best_accuracy       best evaluation so far, and its value of `run.monitor`, by default the accuracy; 0
                                    and -1.0 before the first
    best_loss                       its validation loss; None if unknown, absent in older checkpoints
    task                            what the task keeps beside the weights, such as the scale of a regression; absent in
                                    older checkpoints
    ranks                           per rank: random number generators, running sums of the epoch, and the losses that
                                    no `step` event has reported yet

In a run folder each file is named after its step, `step-00000044.pt`. `last.pt` and `best.pt` are hard links to the
newest and the best one, or copies on a file system without hard links.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import torch

from engine.base.codec import Count, Finite, InvalidRecordError, Meta, Record, convert, field
from engine.base.errors import UsageError
from engine.base.files import (
    fsync_folder,
    link_file,
    open_regular_file,
    opened_folder,
    path_of_descriptor,
    replace_file,
)
from engine.runs.checkpoint_files import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_KEYS,
    CHECKSUM_PREFIX,
    COMMENT_BYTES,
    DamagedCheckpointError,
    check_expansion,
    check_format,
    checkpoints_by_step,
    list_checkpoints,
    verify_checksum,
)
from engine.train.data.sources.base import ImageFormat
from engine.train.models.transfer import load_mapped


class _HashingWriter:
    """Sequential file writer that computes the checksum of what it writes, and calls `on_write` with its size."""

    def __init__(self, file: BinaryIO, on_write: Callable[[int], object]) -> None:
        self._file, self._on_write = file, on_write
        self._tail = b""
        self.checksum = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all but the last two bytes so far, which in a ZIP archive are the length of its comment."""
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
        self._on_write(len(data))

    def flush(self) -> None:
        self._file.flush()

    def close_with_checksum(self) -> None:
        self._write_hashed(struct.pack("<H", COMMENT_BYTES))
        self._file.write(CHECKSUM_PREFIX + self.checksum.hexdigest().encode())


def save_checkpoint(
    state: Mapping[str, Any],
    folder: Path,
    *,
    best: bool,
    keep: int,
    on_write: Callable[[int], object] = lambda size: None,
) -> Path:
    """Write a checkpoint durably, link it as `last.pt` (and `best.pt`), and delete all but the newest `keep`.

    `on_write` is called with the size of each part that is written. Older checkpoints are deleted only after the new
    one is on disk. Raises OSError.
    """

    def write(file: BinaryIO) -> None:
        writer = _HashingWriter(file, on_write)
        try:
            torch.save({"format": CHECKPOINT_FORMAT, **state}, cast(Any, writer))
        except RuntimeError as error:
            # torch's writer hides the OSError of a full disk behind a RuntimeError.
            raise writer.error or error from None
        writer.close_with_checksum()

    name = f"step-{state['step']:08d}.pt"
    folder.mkdir(exist_ok=True)
    with opened_folder(folder) as opened:
        # The best one first: killed here, the run resumes from the step before, and takes this one again.
        replace_file(opened / ("best.pt" if best else name), write, durable=True)
        if best:
            link_file(opened / "best.pt", opened / name)
        # Delete before linking: on a file system without hard links, links are copies and need the space.
        for old in checkpoints_by_step(opened)[keep:]:
            old.unlink(missing_ok=True)
        link_file(opened / name, opened / "last.pt")
        fsync_folder(opened)
    return folder / name


def load_newest(folder: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Load the newest intact checkpoint; also return its path and why newer ones were skipped.

    Returns (None, {}, []) if there is no checkpoint. Damaged files are renamed to `*.damaged`. Raises UsageError if no
    checkpoint is intact, or if one cannot be read or has another format.
    """
    damaged: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return path, load_checkpoint(path), damaged
        except DamagedCheckpointError as error:
            damaged.append(f"{path.name} {error}")
            with suppress(OSError):
                path.rename(path.with_name(f"{path.name}.damaged"))
    damaged += [f"{path.name} is damaged" for path in folder.glob("*.damaged") if not damaged]
    if damaged:
        raise UsageError.one(
            str(folder),
            f"no checkpoint is intact: {'; '.join(damaged)}; use a new name with --name to start a new run",
            code="damaged",
        )
    return None, {}, damaged


class _Content(Record, frozen=True, kw_only=True):
    """Types of the values that identify a model; `load_state_dict` checks the tensors."""

    config: dict[str, dict[str, Any]]
    classes: Annotated[tuple[str, ...], Meta(min_length=1)]
    image_format: ImageFormat
    model: dict[str, Any]
    ema: dict[str, Any] | None
    step: Count
    task: dict[str, tuple[Finite, ...]] = field(default_factory=dict)


def check_content(state: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpointError unless config, classes, image format and weights of a checkpoint are well-formed.

    The checksum only shows that a file is complete: anybody can write one.
    """
    try:
        images = convert(state, _Content).image_format
    except InvalidRecordError as error:
        raise DamagedCheckpointError(str(error)) from error
    valid = {
        "mean": {len(images.mean), len(images.std)} == {images.channels},
        "channels": images.is_float or images.channels in (1, 3),
        "val_resize": (images.val_resize or images.val_size) >= images.val_size,
    }
    if wrong := [name for name, is_valid in valid.items() if not is_valid]:
        raise DamagedCheckpointError(f"is not a gputrain checkpoint: image_format.{wrong[0]} has no valid value")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Verify a checkpoint, and map its tensors into memory if the file system can.

    The file is read when a tensor is: who needs only the weights does not read the optimizer's state. The mapping is
    private, so writing to a tensor does not change the file. It holds the file, even if that is renamed or deleted,
    until the last tensor is gone: what outlives the restoring of a state must be a copy. gputrain never changes a
    checkpoint in place. If somebody else truncates it meanwhile, the kernel ends this process (SIGBUS); only who may
    write to the file can do that.

    Raises DamagedCheckpointError, or UsageError if the file has another format or cannot be read now.
    """
    try:
        # The file is opened once, so that what is loaded is what was verified.
        with open_regular_file(path) as file:
            verify_checksum(file)
            check_expansion(file)
            opened = path_of_descriptor(file.fileno())
            state: dict[str, Any] = load_mapped(opened)
        found = state["format"]
    except DamagedCheckpointError:
        raise
    except (OSError, MemoryError) as error:
        # A fault of the host, not of the file, which may be readable later.
        raise UsageError.one(
            str(path), f"cannot be read now: {error or 'out of memory'}", code="not-readable"
        ) from error
    except Exception as error:
        # A file with a valid checksum need not be a checkpoint. For other content, the unpickler raises exceptions of
        # any type.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DamagedCheckpointError(f"is not a gputrain checkpoint: {reason}") from error
    check_format(path, found)
    if missing := CHECKPOINT_KEYS - state.keys():
        raise DamagedCheckpointError(f"is not a gputrain checkpoint: it lacks {', '.join(sorted(missing))}")
    return state
