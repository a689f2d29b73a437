"""The checkpoint files of a run folder, without torch: their names, their order and their checksum.

`engine.training.checkpoint` describes what they contain, and writes and reads them.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

CHECKPOINT_FORMAT = 3
CHECKPOINT_KEYS = {
    *("config", "classes", "image_format", "model", "ema", "optimizer", "scaler", "plateau", "epoch", "batch", "step"),
    *("skipped", "skipped_in_row", "global_batch", "images", "best_epoch", "best_accuracy", "ranks"),
}
CHECKSUM_PREFIX = b"gputrain sha256 "
COMMENT_BYTES = len(CHECKSUM_PREFIX) + hashlib.sha256().digest_size * 2
_READ_CHUNK_BYTES = 1 << 20


class DamagedCheckpointError(Exception):
    """A checkpoint that is not what was written; the text says how that is known."""


def checkpoints_by_step(folder: Path) -> list[Path]:
    """The newest first."""
    named = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name)]
    return sorted(named, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Every file that a run can go on from, the newest first. A second name of one of them is left out; where the file
    system has no hard links it is a copy, and may be sound where the other is not."""
    steps = checkpoints_by_step(folder)
    found, known = [], set()
    for path in (*steps[:1], folder / "last.pt", *steps[1:], folder / "best.pt"):
        with suppress(OSError):
            status = path.stat()
            if (status.st_dev, status.st_ino) not in known:
                known.add((status.st_dev, status.st_ino))
                found.append(path)
    return found


def verify_checksum(path: Path) -> None:
    """Raises DamagedCheckpointError unless the file's checksum is that of its content, OSError where it cannot be
    read."""
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        left = path.stat().st_size - COMMENT_BYTES
        while left > 0 and (block := file.read(min(_READ_CHUNK_BYTES, left))):
            checksum.update(block)
            left -= len(block)
        comment = file.read()
    if not comment.startswith(CHECKSUM_PREFIX):
        raise DamagedCheckpointError("is cut, or no checkpoint of gputrain")
    if comment != CHECKSUM_PREFIX + checksum.hexdigest().encode():
        raise DamagedCheckpointError("has another checksum than it was written with")
