"""Batches whose JPEG files are decoded on the GPU: a loader process reads them, and cuts them to their crops.

`engine.data.pipelines.loader` makes these batches if the decoder of the run is the GPU, and
`engine.data.pipelines.gpu_decoder` decodes them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from engine.data.pipelines.batch import Batch, BatchDataset, EncodedRows, PendingBatch
from engine.data.pipelines.batch_buffers import shared_memory
from engine.data.sampler import BatchRequest
from engine.data.sources.base import Images
from engine.data.sources.encoded import EncodedSource, decode_for_crop, new_batch
from engine.data.sources.gpu_jpeg import GpuJpeg, prepare_jpeg
from engine.data.stage_times import stage


class PendingEncodedBatch(PendingBatch):
    """A batch whose files are read, and decoded on the GPU.

    Files that the GPU does not decode are decoded by `load_row`. The images of the batch are those of these rows only.
    """

    def __init__(self, source: EncodedSource, dataset: BatchDataset, request: BatchRequest) -> None:
        super().__init__(source, dataset, request)
        self._loaded: list[GpuJpeg | Images | None] = [None] * len(request.indices)

    def _load(self, row: int) -> None:
        index, image_format = self._indices[row], self._source.format
        with stage("read"):
            encoded = self._source.read_encoded(self.request.part, index)
        with stage("crop"):
            self._loaded[row] = prepare_jpeg(encoded.data, index, image_format, self._crop)
        if self._loaded[row] is None:
            with stage("decode"):
                self._loaded[row] = decode_for_crop(encoded, index, image_format, self._crop)

    def _finish(self) -> Batch:
        request, kept = self._dataset.keep_readable(self.request, self._errors)
        unread = tuple(str(self._errors[row]) for row in sorted(self._errors))
        labels = self._source.labels_of(request.part, request.indices)
        with stage("collate"):
            loaded = [self._loaded[row] for row in kept]
            jpegs = {row: jpeg for row, jpeg in enumerate(loaded) if isinstance(jpeg, GpuJpeg)}
            decoded = [pixels for pixels in loaded if isinstance(pixels, np.ndarray)]
            black = np.zeros((self._source.format.channels, self._size, self._size), np.uint8)
            images = self._stack(decoded if kept else [black] * len(request.indices))
        batch = self._dataset.finish(request, images, labels if kept else np.zeros_like(labels), unread)
        return replace(batch, encoded=self._pack(jpegs, request)) if jpegs else batch

    def _stack(self, images: Sequence[Images]) -> Tensor:
        """Return decoded images as one tensor with the channels last in memory."""
        stacked = new_batch(len(images), self._source.format, self._crop)
        for row, pixels in zip(stacked, images, strict=True):
            row[:] = pixels
        return torch.from_numpy(stacked)

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
