"""Batches whose JPEG files are decoded on the GPU: a loader process reads them, and cuts them to their crops.

`engine.data.pipelines.loader` makes these batches if the decoder of the run is the GPU, and
`engine.data.pipelines.gpu_decoder` decodes them on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from engine.data.pipelines.batch import Batch, BatchDataset, EncodedRows
from engine.data.pipelines.batch_buffers import shared_memory
from engine.data.sampler import BatchRequest
from engine.data.sources.base import Images
from engine.data.sources.encoded import EncodedImage, EncodedSource, decode_for_crop
from engine.data.sources.gpu_jpeg import GpuJpeg, prepare_jpeg
from engine.data.stage_times import stage


class PendingEncodedBatch:
    """A batch whose files are read by `load_row`, in any order and in any thread: see `PendingBatch`.

    Files that the GPU does not decode are decoded by `load_row`. The images of the batch are those of these rows only.
    """

    def __init__(self, source: EncodedSource, dataset: BatchDataset, request: BatchRequest) -> None:
        self.request = request
        self._source, self._dataset, self._crop = source, dataset, dataset.crop_spec(request)
        self._indices = request.indices.tolist()
        self._loaded: list[GpuJpeg | Images | None] = [None] * len(request.indices)
        self._errors: dict[int, Exception] = {}
        self._missing = len(request.indices)
        self._changed = threading.Condition()

    def load_row(self, row: int) -> None:
        """Load one image of the request."""
        try:
            loaded = self._load(self._indices[row])
            error = None
        except Exception as caught:
            loaded, error = None, caught
        with self._changed:
            self._loaded[row] = loaded
            if error is not None:
                self._errors[row] = error
            self._missing -= 1
            if self._missing == 0:
                self._changed.notify()

    def _load(self, index: int) -> GpuJpeg | Images:
        with stage("read"):
            encoded = self._source.read_encoded(self.request.part, index)
        with stage("crop"):
            jpeg = self._prepare(encoded, index)
        if jpeg is not None:
            return jpeg
        with stage("decode"):
            return decode_for_crop(encoded, index, self._source.format, self._crop)

    def _prepare(self, encoded: EncodedImage, index: int) -> GpuJpeg | None:
        return prepare_jpeg(encoded.data, index, self._source.format, self._crop)

    def result(self) -> Batch:
        """Wait for all images, and return the batch. Raises the error of the first image that failed."""
        with self._changed:
            while self._missing:
                self._changed.wait()
        request, kept = self._dataset.keep_readable(self.request, self._errors)
        unread = tuple(str(self._errors[row]) for row in sorted(self._errors))
        labels = self._source.labels_of(request.part, request.indices)
        with stage("collate"):
            loaded = [self._loaded[row] for row in kept]
            jpegs = {row: jpeg for row, jpeg in enumerate(loaded) if isinstance(jpeg, GpuJpeg)}
            decoded = [pixels for pixels in loaded if isinstance(pixels, np.ndarray)]
            images = self._stack(decoded if kept else [self._black() for _ in request.indices])
        batch = self._dataset.finish(request, images, labels if kept else np.zeros_like(labels), unread)
        return replace(batch, encoded=self._pack(jpegs, request)) if jpegs else batch

    def _black(self) -> Images:
        return np.zeros((self._source.format.channels, self._size, self._size), np.uint8)

    @property
    def _size(self) -> int:
        return self._source.format.val_size if self._crop is None else self._crop.size

    def _stack(self, images: Sequence[Images]) -> Tensor:
        """Return decoded images as one tensor with the channels last in memory."""
        shape = len(images), self._size, self._size, self._source.format.channels
        stacked = torch.empty(shape, dtype=torch.uint8).permute(0, 3, 1, 2)
        for row, pixels in zip(stacked.numpy(), images, strict=True):
            row[:] = pixels
        return stacked

    def _pack(self, jpegs: dict[int, GpuJpeg], request: BatchRequest) -> EncodedRows:
        """Copy the content of all files to one tensor, in a loader process in shared memory."""
        files = list(jpegs.values())
        plans = [jpeg.plan for jpeg in files]
        ends = np.cumsum([len(jpeg.data) for jpeg in files])
        with stage("collate"):
            num_bytes = int(ends[-1])
            data = shared_memory(num_bytes) if get_worker_info() else torch.empty(num_bytes, dtype=torch.uint8)
            content = data.numpy()
            for jpeg, end in zip(files, ends.tolist(), strict=True):
                content[end - len(jpeg.data) : end] = np.frombuffer(jpeg.data, np.uint8)
        return EncodedRows(
            rows=np.array(list(jpegs)),
            data=data,
            ends=ends,
            shapes=np.array([(jpeg.height, jpeg.width) for jpeg in files]),
            plans=np.array([(*plan.box, plan.width, plan.height, plan.left, plan.top) for plan in plans]),
            size=self._size,
            channels=self._source.format.channels,
            interpolation=plans[0].interpolation,
            request=request,
        )


def load_encoded(source: EncodedSource, dataset: BatchDataset, request: BatchRequest) -> Batch:
    """Load the batch of a request in this thread."""
    pending = PendingEncodedBatch(source, dataset, request)
    for row in range(len(request.indices)):
        pending.load_row(row)
    return pending.result()
