"""Choose what decodes the JPEG files of a run: libjpeg-turbo in its loader processes, or nvJPEG on its GPUs.

The config decides here, before the run has a device. Where it does not, `engine.data.pipelines.measure_decoders`
measures both. Preflight uses `decoder_problems`. None of it imports torch.
"""

from __future__ import annotations

import mmap
import time
from importlib.util import find_spec

from engine.config.pipeline import DecoderName, PipelineName
from engine.config.rules import key_of_image_transform
from engine.config.schema import Config
from engine.data.sources.base import ImageFormat, ImageSource
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.gpu_jpeg import GPU_INTERPOLATIONS
from engine.utils.codec import Record
from engine.utils.errors import Problem, UsageError, not_installed

_POLL_SECONDS = 0.01
_CODES: dict[DecoderName | None, int] = {None: 0, "cpu": 1, "gpu": 2}


class DecoderChoice(Record, frozen=True):
    """A decoder, None while it is still to be measured. `reason` is a clause to print in parentheses; "" if obvious."""

    decoder: DecoderName | None
    reason: str = ""


CPU_DECODER = DecoderChoice("cpu")


class DecoderSwitch:
    """The decoder of a run in anonymous memory that forked processes share. They wait until it is set."""

    def __init__(self, decoder: DecoderName | None = "cpu") -> None:
        self._memory = mmap.mmap(-1, 1)
        self.set(decoder)

    def set(self, decoder: DecoderName | None) -> None:
        self._memory[0] = _CODES[decoder]

    def wait(self) -> DecoderName:
        """Return the decoder as soon as the rank has set it."""
        while not (code := self._memory[0]):
            time.sleep(_POLL_SECONDS)
        return "gpu" if code == _CODES["gpu"] else "cpu"


def choose_decoder(
    config: Config,
    source: ImageSource,
    image_format: ImageFormat,
    pipeline: PipelineName,
    *,
    on_gpu: bool,
    recorded: DecoderName | None,
) -> DecoderChoice:
    """Choose the decoder of a run as far as its config tells. `recorded` is that of the session that is resumed.

    A resumed run keeps its decoder, because the pixels of nvJPEG differ by a few levels from those of libjpeg-turbo.
    Raises UsageError if `data.decoder` is gpu and the GPU cannot decode.
    """
    requested = config.data.decoder
    if requested == "cpu" or not isinstance(source, EncodedSource) or pipeline != "stream":
        if requested == "gpu":
            refused = f"gpu decodes image files in the stream pipeline, but this run uses {pipeline}"
            raise UsageError.one("data.decoder", refused, "set data.decoder=auto", code="conflict")
        return CPU_DECODER
    reason = _reason_against_gpu(config, image_format, on_gpu=on_gpu)
    if requested == "gpu":
        if reason is not None:
            raise UsageError([_gpu_problem(reason)])
        return DecoderChoice("gpu", "set by data.decoder")
    if recorded == "gpu":
        why = "as before it was resumed" if reason is None else f"gpu before it was resumed; now {reason}"
        return DecoderChoice("gpu" if reason is None else "cpu", why)
    if recorded is not None or not on_gpu:
        return CPU_DECODER
    return DecoderChoice(None) if reason is None else DecoderChoice("cpu", reason)


def decoder_problems(config: Config, *, on_gpu: bool) -> list[Problem]:
    """Return why `data.decoder=gpu` is impossible on these devices. `engine.config.rules` has what follows from other
    keys."""
    if config.data.decoder != "gpu":
        return []
    reason = _reason_against_device(on_gpu=on_gpu)
    return [] if reason is None else [_gpu_problem(reason)]


def _gpu_problem(reason: str) -> Problem:
    return Problem("data.decoder", f"gpu is impossible: {reason}", "set data.decoder=auto", code="not-supported")


def _reason_against_device(*, on_gpu: bool) -> str | None:
    if not on_gpu:
        return "this run is on the CPU"
    return None if find_spec("torchcodec") is not None else not_installed("torchcodec")


def _reason_against_gpu(config: Config, image_format: ImageFormat, *, on_gpu: bool) -> str | None:
    """Return why the GPU cannot decode the images of a run, as a clause; None if it can."""
    if (reason := _reason_against_device(on_gpu=on_gpu)) is not None:
        return reason
    if config.device.parallel == "dp":
        return "device.parallel=dp keeps the batches in host memory"
    if (key := key_of_image_transform(config)) is not None:
        return f"{key} changes the images on the CPU"
    if image_format.interpolation not in GPU_INTERPOLATIONS:
        return f"the filter {image_format.interpolation} (data.interpolation) does not run there"
    return None
