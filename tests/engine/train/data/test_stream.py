"""Batches of loader processes: the same for any kind and number, and in memory that is used again."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.train.data.batch import Batch, BatchDataset
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.base import EncodedSource, ImageSource, UnreadableImageError
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.data.stream import BatchBuffers, BatchLoader, ThreadedBatches
from support.messages import raises_problem

SIZES = [(40, 30), (30, 44), (64, 64)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with 24 training and 6 validation photos of two classes."""
    rng = np.random.default_rng(0)
    for number in range(30):
        width, height = SIZES[number % 3]
        folder = tmp_path / ("val" if number >= 24 else "train") / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{number:02}.jpg")
    return tmp_path


def open_photos(root: Path, *overrides: str) -> tuple[Config, ImageSource]:
    data = ["data.dataset=folder", f"data.path={root}", "data.image_size=16", "data.batch_size=4"]
    config = resolve_config(None, [*data, "augment.resized_crop=true", "augment.flip=true", *overrides]).config
    return config, open_source(config)


def load(config: Config, source: ImageSource, workers: int, first_step: int = 0) -> list[Batch]:
    sampler = DistributedBatchSampler(source.num_images("train"), source.num_images("val"), 4, 0, 1, True, 0)
    requests = sampler.requests(2, 1, first_step)
    return list(BatchLoader(source, config, model_input_format(config, source), requests, workers))


def load_in_threads(config: Config, source: ImageSource) -> list[Batch]:
    """Load the batches of two epochs with threads of this process."""
    assert isinstance(source, EncodedSource)
    sampler = DistributedBatchSampler(source.num_images("train"), source.num_images("val"), 4, 0, 1, True, 0)
    dataset = BatchDataset(source, config, model_input_format(config, source))
    buffers = BatchBuffers(processes=1, per_process=3, num_bytes=4 * 3 * 16**2)
    threaded = ThreadedBatches(source, dataset, sampler.requests(2), 3, buffers)
    return list(map(threaded.receive, threaded))


def assert_equal(batches: list[Batch], expected: list[Batch]) -> None:
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch.images, other.images)
        assert np.array_equal(batch.labels, other.labels)
        assert (batch.loss_weight, batch.unread) == (other.loss_weight, other.unread)
        flips = [loaded.augment_params.flip_mask if loaded.augment_params else None for loaded in (batch, other)]
        assert np.array_equal(*flips)


@pytest.mark.parametrize(("kind", "workers"), [("threads", 2), ("threads", 10), ("processes", 2)])
def test_batches_are_same_for_any_kind_and_number_of_workers(photos: Path, kind: str, workers: int) -> None:
    config, source = open_photos(photos, f"data.worker_type={kind}")
    expected = load(config, source, 0)
    assert len(expected) == 2 * (6 + 2)
    assert_equal(load(config, source, workers), expected)
    assert_equal(load(config, source, workers, first_step=4), expected[4:])


@pytest.mark.parametrize("unreadable", [1, 23])
def test_threads_skip_only_unreadable_images(photos: Path, unreadable: int) -> None:
    config, source = open_photos(photos, "data.on_bad=skip")
    for path in sorted((photos / "train").glob("*/*.jpg"))[:unreadable]:
        path.write_bytes(b"no image")
    batches = load_in_threads(config, source)
    assert sum(len(batch.unread) for batch in batches) == 2 * unreadable
    assert_equal(batches, load(config, source, 0))


def test_threads_raise_error_of_unreadable_image(photos: Path) -> None:
    config, source = open_photos(photos)
    bad = sorted((photos / "train").glob("*/*.jpg"))[5]
    bad.write_bytes(b"no image")
    with raises_problem("bad-image", "", bad.name, kind=UnreadableImageError):
        load_in_threads(config, source)


def test_threads_for_images_in_memory_are_refused() -> None:
    with raises_problem("conflict", "data.worker_type", " digits; ", " processes "):
        resolve_config(None, ["data.dataset=digits", "data.worker_type=threads"])


COUNT, CHANNELS, SIZE = 2, 3, 4
SHAPE = (COUNT, CHANNELS, SIZE, SIZE)


def fill_buffer(buffers: BatchBuffers, value: int) -> int | None:
    """Fill a free buffer with a value, and return its number."""
    number = buffers.take(0, SHAPE)
    if number is not None:
        buffers.images(number, SHAPE).fill_(value)
    return number


def test_buffer_is_free_again_when_the_last_view_of_its_images_is_gone() -> None:
    buffers = BatchBuffers(1, 1, 96)
    assert fill_buffer(buffers, 1) == 0
    view = buffers.receive(0, SHAPE)[1:, 0]
    assert fill_buffer(buffers, 2) is None
    assert (view == 1).all()
    del view
    assert fill_buffer(buffers, 2) == 0


def test_images_larger_than_a_buffer_get_none() -> None:
    buffers = BatchBuffers(2, 1, 96)
    assert [buffers.take(process, SHAPE) for process in (0, 1, 0)] == [0, 1, None]
    assert BatchBuffers(1, 1, 95).take(0, SHAPE) is None


def test_buffers_never_change_a_batch_that_the_rank_holds() -> None:
    values = np.random.default_rng(0).integers(0, 256, 60).tolist()
    buffers, held = BatchBuffers(1, 3, 96), list[tuple[int, Tensor]]()
    context = multiprocessing.get_context("fork")
    queue = context.Queue(maxsize=1)

    def load_all() -> None:
        for value in values:
            while (number := fill_buffer(buffers, value)) is None:
                time.sleep(0.001)
            queue.put(number)

    process = context.Process(target=load_all, daemon=True)
    process.start()
    for number, value in enumerate(values):
        held.append((value, buffers.receive(queue.get(timeout=30), SHAPE)))
        # Zero to two batches are in use at a time.
        while len(held) > number % 3:
            held.pop(0)
        for kept, images in held:
            assert (images == kept).all()
    process.join(30)
