"""Batches that a decoder of whole batches decodes: the same as those of the CPU, also with files that it rejects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.torch_version import TorchVersion

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.data.pipelines import gpu_decoder
from engine.data.pipelines.batch import Batch, BatchDataset
from engine.data.pipelines.choose_decoder import DecoderSwitch
from engine.data.pipelines.encoded_batch import PendingEncodedBatch
from engine.data.pipelines.gpu_decoder import DecoderUnavailableError, GpuDecoder, load_decoder, split_by_pixels
from engine.data.pipelines.loader import BatchLoader
from engine.data.sampler import BatchRequest
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from support.data.packed_photos import write_photos
from support.messages import has_problem, raises_problem

CPU = torch.device("cpu")
simplejpeg = pytest.importorskip("simplejpeg")


def decode_jpeg(files: Sequence[Tensor], *, mode: str, device: torch.device) -> list[Tensor]:
    """Decode as torchcodec's function of this name does, on the CPU: one bad file fails them all."""
    try:
        decoded = [simplejpeg.decode_jpeg(file.numpy(), mode, strict=True) for file in files]
    except ValueError as error:
        raise RuntimeError("Failed to decode batch: 4") from error
    return [torch.from_numpy(pixels).permute(2, 0, 1).to(device) for pixels in decoded]


@pytest.fixture(autouse=True)
def fake_nvjpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decoder, "load_decoder", lambda: decode_jpeg)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG files of different sizes, with some rotated ones and PNG files among them."""
    return write_photos(tmp_path_factory.mktemp("photos"), 48, validation=True)


def photos_config(photos: Path, *overrides: str) -> Config:
    keys = ["data.dataset=folder", f"data.path={photos}", "data.image_size=32", "augment.flip=true"]
    return resolve_config(None, [*keys, *overrides]).config


def open_photos(photos: Path, *overrides: str) -> tuple[EncodedSource, BatchDataset]:
    config = photos_config(photos, *overrides)
    source = open_source(config)
    assert isinstance(source, EncodedSource)
    return source, BatchDataset(source, config, model_input_format(config, source))


def assert_equal(batch: Batch, expected: Batch) -> None:
    """The filter rounds once on the GPU and twice on the CPU, so that pixels may differ by 1."""
    assert batch.images.shape == expected.images.shape
    assert (batch.images.int() - expected.images.int()).abs().max() <= 1
    assert torch.equal(batch.labels, expected.labels)
    assert (batch.loss_weight, batch.unread) == (expected.loss_weight, expected.unread)
    flips = [part.augment_params.flip_mask if part.augment_params else None for part in (batch, expected)]
    assert flips[0] is flips[1] is None or torch.equal(*flips)


@pytest.mark.parametrize(
    ("part", "keys"),
    [
        ("train", ["augment.resized_crop=true"]),
        ("train", ["augment.resized_crop=true", "data.channels=1"]),
        ("train", ["data.size_schedule=[40@1]", "data.interpolation=bicubic"]),
        ("val", ["data.val_resize=40"]),
        ("val", ["data.fit=squash"]),
    ],
)
def test_gpu_decoder_yields_images_of_cpu(photos: Path, part: str, keys: list[str]) -> None:
    source, dataset = open_photos(photos, *keys)
    request = BatchRequest("train" if part == "train" else "val", 1, np.arange(11))
    batch = PendingEncodedBatch(source, dataset, request).load()
    assert batch.encoded is not None
    assert len(batch.encoded.rows) + len(batch.images) == 11
    # Rotated images and PNG files.
    assert 0 < len(batch.images) < 8
    assert_equal(GpuDecoder(source, dataset, CPU)(batch, batch.encoded), dataset[request])


def test_encoded_batch_without_plain_jpeg_has_pixels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (40, 40), (200, 0, 0)).save(tmp_path / name / "0.png")
        Image.new("RGB", (40, 40), (0, 0, 200)).save(tmp_path / name / "1.png")
    source, dataset = open_photos(tmp_path)
    request = BatchRequest("train", 1, np.arange(2))
    batch = PendingEncodedBatch(source, dataset, request).load()
    assert batch.encoded is None
    assert_equal(batch, dataset[request])


ROW = 3  # of a plain JPEG


def damage(photos: Path, source: EncodedSource, kind: str) -> str:
    """Damage the JPEG of `ROW`, and return its name. The CPU still decodes it if the damage is in its pixels."""
    name = source.image_names("train")[ROW]
    path = photos / name
    data = bytearray(path.read_bytes())
    if kind == "tables":
        start = data.index(b"\xff\xdb")
        del data[start : start + 2 + int.from_bytes(data[start + 2 : start + 4])]
    elif kind == "pixels":
        data[-20:-2] = b"\xff\xd5" * 9
    else:
        del data[-100:]
    path.write_bytes(data)
    return name


@pytest.fixture
def own_photos(photos: Path, tmp_path: Path) -> Path:
    return write_photos(tmp_path / "own", 16, validation=True)


def test_gpu_decoder_leaves_rejected_file_to_cpu(own_photos: Path) -> None:
    source, dataset = open_photos(own_photos)
    name = damage(own_photos, source, "pixels")
    request = BatchRequest("train", 1, np.arange(6))
    batch = PendingEncodedBatch(source, dataset, request).load()
    assert batch.encoded is not None
    assert ROW in batch.encoded.rows
    decoder = GpuDecoder(source, dataset, CPU)
    decoded, again = (decoder(batch, batch.encoded) for _ in range(2))
    assert decoded.unread == ()
    assert decoded.warning is not None and again.warning is None
    assert has_problem([decoded.warning], "bad-image", "", f" {own_photos / name}: ", "data.decoder=cpu")
    assert_equal(decoded, dataset[request])


@pytest.mark.parametrize("kind", ["tables", "truncated"])
def test_gpu_decoder_skips_unreadable_image(own_photos: Path, kind: str) -> None:
    source, dataset = open_photos(own_photos, "data.on_bad=skip")
    name = damage(own_photos, source, kind)
    request = BatchRequest("train", 1, np.arange(6))
    batch = PendingEncodedBatch(source, dataset, request).load()
    assert batch.encoded is not None
    decoded = GpuDecoder(source, dataset, CPU)(batch, batch.encoded)
    assert len(decoded.unread) == 1
    assert name in decoded.unread[0]
    assert len(decoded.images) == 5
    assert_equal(decoded, dataset[request])


def test_gpu_decoder_fails_with_name_of_unreadable_image(own_photos: Path) -> None:
    source, dataset = open_photos(own_photos)
    name = damage(own_photos, source, "tables")
    batch = PendingEncodedBatch(source, dataset, BatchRequest("train", 1, np.arange(6))).load()
    assert batch.encoded is not None
    with raises_problem("bad-image", "", name, kind=UnreadableImageError):
        GpuDecoder(source, dataset, CPU)(batch, batch.encoded)


def test_encoded_batch_without_readable_images_is_black(own_photos: Path) -> None:
    source, dataset = open_photos(own_photos, "data.on_bad=skip")
    names = source.image_names("train")
    request = BatchRequest("train", 1, np.arange(4))
    for name in names[:4]:
        (own_photos / name).write_bytes(b"no image")
    batch = PendingEncodedBatch(source, dataset, request).load()
    assert batch.loss_weight == 0
    assert_equal(batch, dataset[request])


def test_gpu_decoder_rejects_image_of_other_size(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dataset = open_photos(photos)
    request = BatchRequest("train", 1, np.arange(6))
    batch = PendingEncodedBatch(source, dataset, request).load()
    assert batch.encoded is not None
    encoded = replace(batch.encoded, shapes=batch.encoded.shapes + 1)
    assert torch.equal(GpuDecoder(source, dataset, CPU)(batch, encoded).images, dataset[request].images)


def test_split_by_pixels_bounds_pixels_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decoder, "MAX_PIXELS_PER_CALL", 10)
    assert list(split_by_pixels([4, 4, 4, 12, 1, 9, 1])) == [[0, 1], [2], [3], [4, 5], [6]]
    assert list(split_by_pixels([])) == []


@pytest.mark.parametrize("keys", [["data.workers=2"], ["data.workers=2", "data.worker_type=processes"]])
def test_batch_loader_waits_for_decoder(photos: Path, keys: list[str]) -> None:
    source, dataset = open_photos(photos, "augment.resized_crop=true", *keys)
    config = photos_config(photos, "augment.resized_crop=true", *keys)
    requests = [BatchRequest("train", 1, np.arange(start, start + 5)) for start in range(0, 20, 5)]
    switch = DecoderSwitch(None)
    loader = BatchLoader(source, config, model_input_format(config, source), requests, 2, decoder=switch)
    switch.set("gpu")
    batches = list(loader)
    assert len(batches) == len(requests)
    for batch, request in zip(batches, requests, strict=True):
        assert batch.encoded is not None
        assert_equal(GpuDecoder(source, dataset, CPU)(batch, batch.encoded), dataset[request])


def test_load_decoder_names_version_of_torch_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cu128"))
    with raises_problem("wrong-version", "", " 2.11 ", " 2.9.1", kind=DecoderUnavailableError):
        load_decoder.__wrapped__()
