"""The memory pipeline makes the same batches as the stream pipeline; the fixed pipeline repeats one of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config.loader import resolve_config
from engine.train.data import memory
from engine.train.data.augment.batch_ops import erase
from engine.train.data.augment.crops import random_erasing_boxes, random_resized_crop_boxes
from engine.train.data.checks import build_sampler
from engine.train.data.decoded import load_in_memory
from engine.train.data.device import InputPipeline
from engine.train.data.memory import InMemoryLoader
from engine.train.data.plan import InputPlan
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.base import ImageFormat
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from support.data.device_batches import CPU, assert_the_same, batches
from support.data.photo_folder import AUGMENT_OVERRIDES

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    "data",
    [
        (),
        ("data.channels=3", "data.image_size=14"),
        ("data.dataset=fake", "data.image_size=24"),
        ("data.sampler=balanced",),
        ("data.channels=3", "augment.policy=trivialaugment", "augment.contrast=0.4"),
    ],
)
def test_memory_pipeline_matches_stream_bit_for_bit(data: tuple[str, ...]) -> None:
    config = resolve_config(None, [*AUGMENT_OVERRIDES, *data]).config
    source = open_source(config)
    streamed = batches("stream", config, source)
    assert_the_same(batches("memory", config, source), streamed)
    plain = resolve_config(None, ["data.batch_size=16", *data]).config
    assert not torch.equal(streamed[0].images, batches("stream", plain, source)[0].images)


@pytest.mark.parametrize("size", [12, 32, 50])
def test_memory_pipeline_resized_crop_matches_stream_within_two_levels(size: int) -> None:
    overrides = ["augment.resized_crop=true", "augment.flip=true", "data.dataset=fake", "data.batch_size=16"]
    config = resolve_config(None, [*overrides, "data.mean=[0,0,0]", "data.std=[1,1,1]"]).config
    source = open_source(config)
    config = config.model_copy(update={"data": config.data.model_copy(update={"image_size": size})})
    sampler = DistributedBatchSampler(96, 37, 16, 0, 1, True, 0, balanced_labels=np.arange(96) % 10)
    streamed, in_memory = (batches(pipeline, config, source, sampler) for pipeline in ("stream", "memory"))
    assert_the_same(in_memory, streamed, within=2.01 / 255)
    assert sum(float((a.images - b.images).abs().mean()) for a, b in zip(in_memory, streamed, strict=True)) < 0.02


def test_random_erasing_boxes_match_torchvision_distribution() -> None:
    from torchvision.transforms import v2

    torch.manual_seed(0)
    transform = v2.RandomErasing(1.0)
    expected_boxes = [transform.make_params([torch.empty(1, 24, 24)]) for _ in range(3000)]
    boxes = random_erasing_boxes(1.0, 24, 1, 1, np.arange(30_000))
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    for actual, expected in (
        (width, [box["w"] for box in expected_boxes]),
        (height, [box["h"] for box in expected_boxes]),
        (width * height, [box["w"] * box["h"] for box in expected_boxes]),
    ):
        probabilities = np.linspace(0.1, 0.9, 9)
        assert np.quantile(actual, probabilities) == pytest.approx(
            np.quantile(expected, probabilities), abs=1.0, rel=0.06
        )


def test_erase_fills_only_rectangle_with_mean() -> None:
    images = torch.zeros((2, 3, 6, 6), dtype=torch.uint8)
    erased = erase(images, torch.tensor([[1, 2, 4, 6], [0, 0, 0, 0]]), (10, 20, 30))
    assert erased[0, :, 2:6, 1:4].flatten(1).unique(dim=1).tolist() == [[10], [20], [30]]
    assert int((erased[0, 0] > 0).sum()) == 12
    assert not erased[1].any()


def test_random_resized_crop_boxes_have_requested_shape_and_fall_back_to_center() -> None:
    left, top, right, bottom = random_resized_crop_boxes((0.2, 0.5), (0.5, 2.0), 40, 60, 0, 1, np.arange(4000)).T
    area, ratio = (right - left) * (bottom - top) / 2400, (right - left) / (bottom - top)
    assert (left >= 0).all() and (right <= 60).all() and (top >= 0).all() and (bottom <= 40).all()
    assert area.min() > 0.18 and area.max() < 0.53 and ratio.min() > 0.47 and ratio.max() < 2.15
    assert (
        random_resized_crop_boxes((0.9, 1.0), (1.0, 1.0), 10, 40, 0, 1, np.arange(2)).tolist() == [[15, 0, 25, 10]] * 2
    )
    assert random_resized_crop_boxes((0.9, 1.0), (2.0, 2.0), 40, 10, 0, 1, np.arange(1)).tolist() == [[0, 17, 10, 22]]


def test_fixed_pipeline_repeats_first_batch_in_requested_sizes() -> None:
    config = resolve_config(None, AUGMENT_OVERRIDES).config
    source = open_source(config)
    sampler = DistributedBatchSampler(72, 37, 16, 0, 1, False, 0, accumulate=2)
    streamed, fixed = (batches(pipeline, config, source, sampler) for pipeline in ("stream", "fixed"))
    first_images: dict[bool, Tensor] = {}
    assert len(fixed) == len(streamed)
    for request, batch, streamed_batch in zip(sampler.requests(2), fixed, streamed, strict=True):
        is_train = request.part == "train"
        first_images.setdefault(is_train, streamed_batch.images)
        assert (batch.loss_weight, batch.ends_step, len(batch.labels)) == (
            streamed_batch.loss_weight,
            streamed_batch.ends_step,
            len(streamed_batch.labels),
        )
        assert torch.equal(batch.images, first_images[is_train][: len(batch.images)])
    assert len({len(batch.labels) for batch in fixed}) > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("extra", [(), ("augment.resized_crop=true",), ("augment.policy=randaugment",)])
def test_memory_pipeline_on_gpu_matches_cpu_without_sync(extra: tuple[str, ...]) -> None:
    overrides = [
        *(AUGMENT_OVERRIDES if not extra else AUGMENT_OVERRIDES[1:]),
        *extra,
        "data.dataset=fake",
        "data.fake_train=160",
    ]
    config = resolve_config(None, overrides).config
    source = open_source(config)
    expected = batches("memory", config, source)
    choice, image_format = InputPlan("memory", ""), model_input_format(config, source)
    requests = list(build_sampler(config, source, 1).requests(2))
    next(InputPipeline(choice, source, config, image_format, requests).device_loader(torch.device("cuda")))
    loader = InputPipeline(choice, source, config, image_format, requests).device_loader(torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches_on_gpu = [next(loader) for _ in requests]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, expected_batch in zip(batches_on_gpu, expected, strict=True):
        assert torch.equal(batch.labels.cpu(), expected_batch.labels)
        # CUDA divides by 255 as a multiplication, which differs in the last bit.
        tolerance = 0.01 if "resized" in str(extra) else 1e-6
        torch.testing.assert_close(batch.images.cpu(), expected_batch.images, atol=tolerance, rtol=1e-6)


def test_memory_pipeline_groups_batches_by_memory_at_source_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve_config(None, ["augment.resized_crop=true", "data.dataset=fake", "data.batch_size=16"]).config
    source, small = open_source(config), ImageFormat(8, 3, (0.5,) * 3, (0.5,) * 3)
    requests = list(DistributedBatchSampler(96, 32, 16, 0, 1, True, 0).requests(1))
    loader = InMemoryLoader(load_in_memory(source, config, small), config, small, requests, CPU)
    monkeypatch.setattr(memory, "MAX_PREPARED_BYTES", 2 * 16 * 3 * 32**2 * 4)
    train, val = requests[:6], requests[6:]
    for requests_of_part, group_sizes in ((train, [2, 2, 2]), (val, [2])):
        pairs = [(request, ()) for request in requests_of_part]
        assert [len(group) for group, _ in loader._group_requests(pairs, on_device=True)] == group_sizes
