"""SPDL's threads, as its guide "Migrating from PyTorch DataLoader" ends: one thread per core, no processes.

Options: "ffmpeg" decodes, crops, resizes and flips with `spdl.io` and its FFmpeg filters, as its pages "Using filters
for augmentation" and "Switching to SPDL I/O" recommend. "simplejpeg" runs the function of `by_hand_simplejpeg` in its
threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import shuffle
from typing import Any

import spdl.io
import torch
from by_hand_simplejpeg import load
from spdl.pipeline import PipelineBuilder
from task import SIZE, Batches, Task, random_box, random_flip
from torch import Tensor

# Batches ready for the training process, as in SPDL's examples.
SINK_SIZE = 3


def paths(task: Task) -> Iterator[Path]:
    files = task.files()
    while True:
        shuffle(files)
        yield from files


def decode(path: Path) -> Any:
    """Return the cropped frame; the batch is the first copy of its pixels."""
    packets = spdl.io.demux_image(str(path))
    left, top, right, bottom = random_box(packets.width, packets.height)
    filters = [f"crop={right - left}:{bottom - top}:{left}:{top}", f"scale={SIZE}:{SIZE}:flags=bilinear"]
    if random_flip():
        filters.append("hflip")
    filter_desc = spdl.io.get_video_filter_desc(filter_desc=",".join(filters), pix_fmt="rgb24")
    return spdl.io.decode_packets(packets, filter_desc=filter_desc)


def convert(frames: list[Any]) -> Tensor:
    return spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)


def batches(task: Task, option: str) -> Batches:
    load_one, collate = (decode, convert) if option == "ffmpeg" else (load, torch.stack)
    pipeline = (
        PipelineBuilder()
        .add_source(paths(task))
        .pipe(load_one, concurrency=task.cores, output_order="input")
        .aggregate(task.batch_size, drop_last=True)
        .pipe(collate)
        .add_sink(SINK_SIZE)
        .build(num_threads=task.cores)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()
