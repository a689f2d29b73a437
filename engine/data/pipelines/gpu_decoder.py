"""Decode the JPEG files of a batch on the GPU with nvJPEG through torchcodec, then crop and resize them there.

`engine.data.pipelines.device` calls it on the copy stream for the batches of `engine.data.pipelines.encoded_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from engine.config.data_sections import Interpolation
from engine.data.pipelines.batch import Batch, BatchDataset, EncodedRows
from engine.data.sampler import BatchRequest
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.encoded import EncodedSource, new_batch
from engine.utils.errors import CodedError, Problem

# Pixels that one call decodes. They take 192 MiB of device memory as RGB.
MAX_PIXELS_PER_CALL = 1 << 26

# Times the code in its context as a stage of `engine.data.stage_times` that runs on the device.
DeviceStage = Callable[[str], AbstractContextManager[None]]


class DecoderUnavailableError(CodedError):
    """nvJPEG cannot be used. The message says why, as a clause."""


class GpuDecoder:
    """Decodes batches of an `EncodedSource` on a device, on its current CUDA stream. The host waits for nvJPEG.

    Files that nvJPEG rejects are loaded once more, on the CPU. As there, an unreadable image is skipped or raises
    UnreadableImageError, as `data.on_bad` says.
    """

    def __init__(self, source: EncodedSource, dataset: BatchDataset, device: torch.device) -> None:
        self._source, self._dataset, self._device = source, dataset, device
        self._has_warned = False

    def __call__(self, batch: Batch, encoded: EncodedRows, time_stage: DeviceStage = lambda _: nullcontext()) -> Batch:
        """Return a batch with all its images on the device, N x C x size x size uint8.

        `batch.images` are those that the CPU has decoded, on the device, and `encoded` all others.
        """
        resized = torch.empty((len(batch.labels), encoded.channels, encoded.size, encoded.size), device=self._device)
        files, shapes, plans = encoded.files(), encoded.shapes.tolist(), encoded.plans.tolist()
        rows, rejected = encoded.rows.tolist(), list[int]()
        for numbers in split_by_pixels([height * width for height, width in shapes]):
            with time_stage("decode"):
                decoded = decode_files([files[number] for number in numbers], self._device, encoded.channels)
            with time_stage("crop"):
                for number, pixels in zip(numbers, decoded, strict=True):
                    if pixels is None or list(pixels.shape[1:]) != shapes[number]:
                        rejected.append(rows[number])
                    else:
                        resize_into(pixels, plans[number], encoded.interpolation, resized[rows[number]])
        images = resized.round_().clamp_(0, 255).to(torch.uint8)
        on_gpu = set(rows)
        others = [row for row in range(len(images)) if row not in on_gpu]
        for row, pixels in zip(others, batch.images, strict=True):
            images[row] = pixels
        batch = replace(batch, images=images, encoded=None)
        if not rejected:
            return batch
        return self._load_on_cpu(self._with_warning(batch, rejected[0], encoded.request), rejected, encoded.request)

    def _with_warning(self, batch: Batch, row: int, request: BatchRequest) -> Batch:
        """Return the batch with a warning about its rejected image, the first time."""
        if self._has_warned:
            return batch
        try:
            name = self._source.read_encoded(request.part, int(request.indices[row])).name()
        except UnreadableImageError:
            # It is reported as such.
            return batch
        self._has_warned = True
        reason = f"nvJPEG rejects {name}: the CPU loads such images again; if they are many, set data.decoder=cpu"
        return replace(batch, warning=Problem("", reason, code="bad-image"))

    def _load_on_cpu(self, batch: Batch, rows: Sequence[int], request: BatchRequest) -> Batch:
        """Load some images of a batch from their source, and drop those that the CPU cannot decode either."""
        errors, crop = dict[int, Exception](), self._dataset.crop_spec(request)
        for row in rows:
            pixels = new_batch(1, self._source.format, crop)
            try:
                self._source.load_into(pixels[0], request.part, int(request.indices[row]), crop)
            except Exception as error:
                errors[row] = error
            else:
                batch.images[row] = torch.from_numpy(pixels[0]).to(self._device)
        if not errors:
            return batch
        readable = self._dataset.finish_rows(self._source, request, batch.images, errors)
        return replace(readable, unread=(*batch.unread, *readable.unread), warning=batch.warning)


def split_by_pixels(pixels: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of images of these sizes, in order, in groups of at most `MAX_PIXELS_PER_CALL`."""
    group, total = list[int](), 0
    for number, count in enumerate(pixels):
        if group and total + count > MAX_PIXELS_PER_CALL:
            yield group
            group, total = [], 0
        group.append(number)
        total += count
    if group:
        yield group


def decode_files(files: Sequence[Tensor], device: torch.device, channels: int) -> list[Tensor | None]:
    """Decode JPEG files on a device, C x H x W uint8 with 1 or 3 channels; None for those that nvJPEG rejects."""
    decode_jpeg, mode = load_decoder(), "GRAY" if channels == 1 else "RGB"
    try:
        return list(decode_jpeg(list(files), mode=mode, device=device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # The error does not say which of the files it is about.
        if len(files) == 1:
            return [None]
        return [decoded for file in files for decoded in decode_files([file], device, channels)]


def resize_into(pixels: Tensor, plan: Sequence[int], interpolation: Interpolation, out: Tensor) -> None:
    """Crop and resize C x H x W uint8 pixels to `out`, C x size x size float32, as a row of `EncodedRows.plans` says.

    The result is not rounded. torch's uint8 kernel, which the CPU uses, has no counterpart on the GPU.
    """
    left, top, right, bottom, width, height, out_left, out_top = plan
    resize = _RESIZE[interpolation]
    cropped, size = pixels[None, :, top:bottom, left:right].float(), out.shape[-1]
    if interpolation == "bicubic":
        # Its result exceeds 0 to 255 beside an edge. Pillow clips it after each of its two passes, the first is this.
        cropped = resize(cropped, (bottom - top, width), False).clamp_(0, 255)
    if (height, width) == (size, size):
        resize.out(cropped, (height, width), False, out=out[None])
    else:
        resized = resize(cropped, (height, width), False)[0]
        out.copy_(resized[:, out_top : out_top + size, out_left : out_left + size])


# F.interpolate has no `out`: it would take another copy of each image.
_RESIZE: dict[Interpolation, Any] = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa,
}


def check_nvjpeg(device: torch.device) -> None:
    """Decode a small JPEG on a device. Raises DecoderUnavailableError if that does not work."""
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    decode_jpeg = load_decoder()
    try:
        decode_jpeg([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], mode="RGB", device=device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise DecoderUnavailableError(f"nvJPEG does not work on {device} ({reason})", code="library-failed") from error


@cache
def load_decoder() -> Any:
    """Return torchcodec's `decode_jpeg`. It does not need FFmpeg. Raises DecoderUnavailableError."""
    # torchcodec decodes images since version 0.16, which needs this torch. A TorchVersion compares numbers.
    if torch.__version__ < "2.11":
        raise DecoderUnavailableError(
            f"nvJPEG needs torch 2.11 or later, and this is torch {torch.__version__}", code="wrong-version"
        )
    try:
        from torchcodec.decoders import decode_jpeg
    except ImportError as error:
        raise DecoderUnavailableError(f"torchcodec cannot be imported ({error})", code="library-failed") from error
    except (OSError, RuntimeError) as error:
        # Its libraries are built for certain versions of torch and CUDA.
        reason = str(error).partition("\n")[0]
        raise DecoderUnavailableError(
            f"torchcodec does not work with torch {torch.__version__} ({reason})", code="library-failed"
        ) from error
    return decode_jpeg
