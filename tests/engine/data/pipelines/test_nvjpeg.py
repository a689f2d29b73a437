"""JPEG files that nvJPEG decodes on a GPU: the pixels of the CPU within a tolerance, and errors that name the image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.config.loader import resolve_config
from engine.config.pipeline import DecoderName
from engine.data.pipelines.choose import PipelineChoice
from engine.data.pipelines.choose_decoder import DecoderChoice
from engine.data.pipelines.device import DeviceBatch, DeviceLoader
from engine.data.pipelines.gpu_decoder import DecoderUnavailableError, decode_files, load_decoder
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from support.data.packed_photos import write_photos

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# Levels of 255. nvJPEG rounds its inverse DCT in another way, and upsamples chroma with another filter.
MEAN_TOLERANCE = 2.0
STREAM = PipelineChoice("stream", "")


@pytest.fixture(autouse=True)
def torchcodec() -> None:
    try:
        load_decoder()
    except DecoderUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_nvjpeg_decodes_pixels_of_cpu(tmp_path: Path, mode: str, subsampling: str) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    photo = Image.fromarray(blocks).resize((250, 187), Image.Resampling.BICUBIC).convert(mode)
    options = {} if mode == "L" else {"subsampling": subsampling}
    photo.save(tmp_path / "photo.jpg", quality=95, **options)
    data = torch.frombuffer(bytearray((tmp_path / "photo.jpg").read_bytes()), dtype=torch.uint8)
    for channels, expected_mode in ((3, "RGB"), (1, "L")):
        decoded = decode_files([data, data], torch.device("cuda"), channels)
        with Image.open(tmp_path / "photo.jpg") as image:
            image.draft(expected_mode, image.size)
            expected = np.asarray(image.convert(expected_mode), np.float32).reshape(187, 250, channels)
        for pixels in decoded:
            assert pixels is not None
            difference = np.abs(pixels.permute(1, 2, 0).cpu().numpy().astype(np.float32) - expected)
            assert difference.mean() <= MEAN_TOLERANCE


class Photos:
    """A folder of photos that is already open."""

    def __init__(self, path: Path, *keys: str) -> None:
        folder = ["data.dataset=folder", f"data.path={path}", "data.image_size=32", "augment.flip=true"]
        self.config = resolve_config(None, [*folder, "augment.resized_crop=true", *keys]).config
        source = open_source(self.config)
        assert isinstance(source, EncodedSource)
        self.path, self.source = path, source
        self.format = model_input_format(self.config, source)

    def start(self, decoder: DecoderName, workers: int) -> DeviceLoader:
        counts = self.source.num_images("train"), self.source.num_images("val")
        requests = DistributedBatchSampler(*counts, 8, 0, 1, False, 0).requests(1)
        pipeline = InputPipeline(
            STREAM,
            self.source,
            self.config,
            self.format,
            requests,
            workers,
            decoder_choice=DecoderChoice(decoder),
        )
        return pipeline.device_loader(torch.device("cuda"))


def all_of(loader: DeviceLoader) -> list[DeviceBatch]:
    return list(iter(loader.__next__, None))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_nvjpeg_are_those_of_cpu(tmp_path: Path, workers: int) -> None:
    photos = Photos(write_photos(tmp_path / "photos", 48, validation=True))
    std = 255 * torch.tensor(photos.format.std).view(1, -1, 1, 1)
    gpu = photos.start("gpu", workers)
    gpu.start_stage_times()
    batches, expected_batches = all_of(gpu), all_of(photos.start("cpu", workers))
    assert len(batches) == len(expected_batches) == 5 + 2
    for batch, expected in zip(batches, expected_batches, strict=True):
        difference = (batch.images - expected.images).abs().cpu() * std
        assert difference.mean() <= MEAN_TOLERANCE
        assert torch.equal(batch.labels, expected.labels)
    times = gpu.stop_stage_times()
    assert times is not None
    assert min(times.seconds[stage] for stage in ("decode", "crop", "copy")) > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_nvjpeg_names_unreadable_image(tmp_path: Path, workers: int) -> None:
    photos = Photos(write_photos(tmp_path / "photos", 48, validation=True), "data.on_bad=skip")
    damaged = next(name for name in photos.source.image_names("train") if name.endswith("13.jpg"))
    data = bytearray((photos.path / damaged).read_bytes())
    tables = data.index(b"\xff\xdb")
    del data[tables : tables + 2 + int.from_bytes(data[tables + 2 : tables + 4])]
    (photos.path / damaged).write_bytes(data)
    batches = all_of(photos.start("gpu", workers))
    unread = [message for batch in batches for message in batch.unread]
    assert len(unread) == 1
    assert damaged in unread[0]
    assert sum(len(batch.images) for batch in batches) == 47
