"""A run of millions of events in gigabytes of event files with images, whose extremes are known."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.foreign import event, frame, scalar

TAGS = 20
NAMES = [f"{part}/metric_{number:02d}" for number in range(TAGS // 2) for part in ("train", "valid")]
IMAGE_BYTES = 1 << 20
STEPS_PER_CHUNK = 1000
FIRST_STEP = 1 << 14
"""Steps from here to 128 times as many have varints of three bytes, so that all records have one length."""


@dataclass(frozen=True)
class KnownMetric:
    """What the reader must find of a metric."""

    count: int
    low: float
    high: float
    last: float


def write_large_run(path: Path, num_events: int, num_bytes: int, seed: int = 0) -> dict[str, KnownMetric]:
    """Write an event file of `num_bytes`: scalars, and images between them, whose bytes are holes of the file."""
    random = np.random.default_rng(seed)
    steps = num_events // TAGS
    records = [frame(event(FIRST_STEP, scalar(name, 0.0))) for name in NAMES]
    (length,) = {len(record) for record in records}
    template = np.frombuffer(b"".join(records), np.uint8).reshape(TAGS, length)
    # Frame of 12 bytes, wall time of 9, the key of the step; the value and the checksum are at the end.
    step_at, value_at = 12 + 9 + 1, length - 8
    values = random.normal(size=(steps, TAGS)).astype("<f4")
    num_images = max((num_bytes - steps * TAGS * length) // IMAGE_BYTES, 0)
    chunks = -(-steps // STEPS_PER_CHUNK)
    image_head = frame(bytes(IMAGE_BYTES - 16))[: struct.calcsize("<QI")]
    written = 0
    with path.open("wb") as file:
        for chunk in range(chunks):
            first, last = chunk * STEPS_PER_CHUNK, min((chunk + 1) * STEPS_PER_CHUNK, steps)
            table = np.tile(template, (last - first, 1, 1))
            number = (FIRST_STEP + np.arange(first, last))[:, None]
            for byte in range(3):
                table[:, :, step_at + byte] = number >> (7 * byte) & 0x7F | (0x80 if byte < 2 else 0)
            table[:, :, value_at : value_at + 4] = values[first:last, :, None].view(np.uint8)
            file.write(table.tobytes())
            while written < num_images * (chunk + 1) // chunks:
                written += 1
                file.write(image_head)
                file.seek(IMAGE_BYTES - len(image_head), 1)
        file.truncate()
    return {
        name: KnownMetric(steps, float(column.min()), float(column.max()), float(column[-1]))
        for name, column in zip(NAMES, values.T, strict=True)
    }
