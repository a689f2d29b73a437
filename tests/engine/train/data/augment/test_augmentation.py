"""Augmentation: per-image and batch transforms, resized crops, user transforms, mixup and CutMix."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as reference

from engine.config.loader import resolve_config
from engine.config.user_errors import UserCodeError
from engine.train.data.augment.augmentation import Augmentation, apply_batch_params
from engine.train.data.augment.crops import random_resized_crop_box, random_resized_crop_boxes
from engine.train.data.augment.mixup import MixupCutmix
from engine.train.data.sampler import Indices, RandomStream, random_bits
from engine.train.data.sources.base import ImageFormat
from engine.train.data.sources.open import open_source
from support.messages import raises_problem

RGB = ImageFormat(16, 3, (0.5, 0.4, 0.3), (0.25, 0.25, 0.25))
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 3, 16, 16), np.uint8))
ALL = np.arange(8)
BILINEAR = InterpolationMode.BILINEAR


def augmentation(*overrides: str, images: ImageFormat = RGB) -> Augmentation:
    return Augmentation(resolve_config(None, [f"augment.{override}" for override in overrides]).config, images)


def augmented_by(augmentation: Augmentation, images: Tensor, epoch: int, indices: Indices) -> Tensor:
    """Apply all transforms to a training batch on the CPU."""
    transformed = augmentation.apply_image_transforms(images, epoch, indices)
    return apply_batch_params(transformed, augmentation.draw_batch_params(epoch, indices))


def transform_one_by_one(transform: v2.Transform, stream: RandomStream, images: Tensor, epoch: int) -> Tensor:
    """Apply a torchvision transform to one image at a time, seeding torch for each as `Augmentation` does."""
    bits = random_bits(0, stream, epoch, np.arange(len(images)))
    transformed = []
    for image, seed in zip(images, bits, strict=True):
        torch.manual_seed(int(seed))
        transformed.append(transform(image))
    return torch.stack(transformed)


@pytest.mark.parametrize(
    ("overrides", "stream", "transform"),
    [
        (("policy=randaugment",), RandomStream.POLICY, v2.RandAugment(interpolation=BILINEAR)),
        (
            ("policy=randaugment", "policy_ops=3", "policy_magnitude=15"),
            RandomStream.POLICY,
            v2.RandAugment(3, 15, interpolation=BILINEAR),
        ),
        (("policy=trivialaugment",), RandomStream.POLICY, v2.TrivialAugmentWide(interpolation=BILINEAR)),
        (
            ("brightness=0.4", "contrast=0.3", "saturation=0.2", "hue=0.1"),
            RandomStream.COLOR_JITTER,
            v2.ColorJitter(0.4, 0.3, 0.2, 0.1),
        ),
        (
            ("rotation=30", "translate=0.2", "scale=[0.8, 1.2]", "shear=10"),
            RandomStream.AFFINE,
            v2.RandomAffine(30, (0.2, 0.2), (0.8, 1.2), 10, BILINEAR, [128, 102, 76]),
        ),
        (("grayscale=0.5",), RandomStream.GRAYSCALE, v2.RandomGrayscale(0.5)),
        (("blur=0.5",), RandomStream.BLUR, v2.RandomApply([v2.GaussianBlur(3, (0.1, 2.0))], 0.5)),
    ],
)
def test_augmentation_matches_torchvision_seeded_per_image(
    overrides: tuple[str, ...], stream: RandomStream, transform: v2.Transform
) -> None:
    augmented = augmented_by(augmentation(*overrides), IMAGES, 3, ALL)
    assert torch.equal(augmented, transform_one_by_one(transform, stream, IMAGES, 3))
    assert not torch.equal(augmented, IMAGES)


def test_augmentation_applies_transforms_in_order() -> None:
    steps = [("crop_padding=2", "flip=true"), ("vertical_flip=true",), ("rotation=20",), ("policy=trivialaugment",)]
    steps += [("contrast=0.8",), ("grayscale=0.5",), ("blur=0.5",), ("erasing=1.0",)]
    expected = IMAGES
    for step in steps:
        expected = augmented_by(augmentation(*step), expected, 1, ALL)
    together = augmentation(*(key for step in steps for key in step))
    assert torch.equal(augmented_by(together, IMAGES, 1, ALL), expected)


def test_vertical_flip_flips_half_of_the_images_independently_of_horizontal_flip() -> None:
    many, indices = IMAGES.repeat(50, 1, 1, 1), np.arange(400)
    flipped = (augmented_by(augmentation("vertical_flip=true"), many, 1, indices) == many.flip(-2)).flatten(1).all(1)
    mirrored = (augmented_by(augmentation("flip=true"), many, 1, indices) == many.flip(-1)).flatten(1).all(1)
    assert 160 < flipped.sum() < 240
    assert 160 < (flipped == mirrored).sum() < 240


def test_randaugment_draws_magnitude_of_each_operation() -> None:
    augmented = augmented_by(
        augmentation("policy=randaugment", "policy_magnitude=15", "policy_magnitude_std=9"), IMAGES, 3, ALL
    )
    magnitudes = []
    for image, result, seed in zip(
        IMAGES, augmented, random_bits(0, RandomStream.POLICY, 3, ALL).tolist(), strict=True
    ):
        random.seed(seed)
        torch.manual_seed(seed)
        for _ in range(2):
            magnitudes.append(min(max(round(random.gauss(15, 9)), 0), 30))
            image = v2.RandAugment(1, magnitudes[-1], interpolation=BILINEAR)(image)
        assert torch.equal(result, image)
    assert len(set(magnitudes)) > 10


def test_grayscale_has_no_effect_on_images_of_one_channel() -> None:
    gray = augmentation("grayscale=1", images=ImageFormat(16, 1, (0.5,), (0.5,)))
    assert not gray.has_image_transforms


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with two classes of a 640 x 480 color gradient, as PNG and as JPEG."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    down, across = np.mgrid[0:480, 0:640]
    pixels = np.stack([across // 3, down // 2, (across + down) // 5], -1).astype(np.uint8)
    upright = Image.fromarray(pixels)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        upright.save(tmp_path / "photos" / name / "0.png")
        upright.save(tmp_path / "photos" / name / "1.jpg", quality=98)
    return tmp_path / "photos"


def test_resized_crop_samples_whole_photo_file(photos: Path) -> None:
    overrides = [f"data.path={photos}", "data.dataset=folder", "data.image_size=32", "data.val_split=0.01"]
    config = resolve_config(None, [*overrides, "augment.resized_crop=true", "augment.crop_scale=[0.1, 0.4]"]).config
    source = open_source(config)
    crop = Augmentation(config, source.format).preprocessing(1)
    assert crop.random_box is not None
    upright = torch.from_numpy(np.asarray(Image.open(photos / "a" / "0.png")).copy()).permute(2, 0, 1)
    for index in range(source.num_images("train")):
        left, top, right, bottom = crop.random_box(index, 480, 640)
        expected = reference.resized_crop(upright, top, left, bottom - top, right - left, [32, 32], antialias=True)
        cropped = torch.from_numpy(source.load("train", np.array([index]), crop)[0][0])
        assert (cropped.int() - expected.int()).abs().max() <= 6, source


NUMBERS = itertools.count()


def user_augmentation(folder: Path, text: str, name: str = "change") -> Augmentation:
    """Return an augmentation with a user transform, written to a module of its own."""
    module = f"own_{next(NUMBERS)}"
    (folder / f"{module}.py").write_text(f"import random\nimport numpy as np\nimport torch\n\n{text}\n")
    return Augmentation(
        resolve_config(
            None, [f"augment.transform={module}:{name}", f"run.code={folder}", "augment.erasing=0.5"]
        ).config,
        RGB,
    )


DRAWS = """
def change(image):
    image[0] = random.randrange(256)
    image[1] = np.random.randint(256)
    image[2] = torch.randint(256, ())
    return image
"""


def test_user_transform_draws_from_any_generator_and_restores_rng_state(tmp_path: Path) -> None:
    augment, images = user_augmentation(tmp_path, DRAWS), IMAGES.clone()
    before = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    augmented = augmented_by(augment, images, 1, ALL)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (before[0], before[2])
    assert torch.equal(torch.get_rng_state(), before[1])
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert torch.equal(augmented_by(augment, IMAGES[[6, 1]].clone(), 1, np.array([6, 1])), augmented[[6, 1]])
    assert len({tuple(image[:, 0, 0].tolist()) for image in augmented}) == 8


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("return image.float()", ["Tensor of float32, 3 x 16 x 16; ", "Tensor of uint8, 3 x 16 x 16"]),
        ("return image[:, :8]", ["Tensor of uint8, 3 x 8 x 16; ", "Tensor of uint8, 3 x 16 x 16"]),
        ("return image.numpy()", ["ndarray of uint8, 3 x 16 x 16; ", "Tensor of uint8"]),
        ("raise ValueError('no\\nway')", ["ValueError: no (", ".py, line 6)"]),
    ],
)
def test_user_transform_error_names_transform(tmp_path: Path, body: str, values: list[str]) -> None:
    augment = user_augmentation(tmp_path, f"def change(image):\n    {body}")
    with raises_problem("user-code-failed", "", "augment.transform own_", ":change ", *values, kind=UserCodeError):
        augmented_by(augment, IMAGES, 1, ALL)


def test_user_transform_rejects_missing_name_and_non_callable(tmp_path: Path) -> None:
    with raises_problem("not-found", "augment.transform", " chnage", "change?"):
        user_augmentation(tmp_path, "def change(image): return image", "chnage")
    with raises_problem("invalid-value", "augment.transform", ":change ", "int"):
        user_augmentation(tmp_path, "change = 3")


LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
FLOATS = IMAGES.float() / 255


def mixer(*overrides: str) -> MixupCutmix:
    return MixupCutmix(
        resolve_config(None, [f"augment.{override}" for override in overrides]).config.augment, 5, seed=0
    )


def test_mixer_applies_mixup_or_cutmix_per_batch() -> None:
    mix = mixer("mixup=0.5", "cutmix=1.0")
    mixed = [mix(FLOATS, LABELS, 1, batch, 0)[0] for batch in range(40)]
    num_cutmix = sum(bool(((images == FLOATS) | (images == FLOATS.roll(1, 0))).all()) for images in mixed)
    assert 8 < num_cutmix < 32


def test_mixer_mixes_a_share_of_the_batches_of_the_first_epochs() -> None:
    mix = mixer("mixup=0.5", "mix_probability=0.25", "mix_epochs=2")
    mixed = [[mix(FLOATS, LABELS, epoch, batch, 0)[1] is not LABELS for batch in range(80)] for epoch in (1, 2, 3)]
    assert [10 < sum(epoch) < 30 for epoch in mixed[:2]] == [True, True]
    assert not any(mixed[2])


def test_mixer_depends_only_on_seed_epoch_batch_and_rank() -> None:
    mix, before = mixer("mixup=0.5", "cutmix=1.0"), torch.get_rng_state()
    images, _ = mix(FLOATS, LABELS, 2, 7, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(mix(FLOATS, LABELS, 2, 7, 1)[0], images)
    for epoch, batch, rank in ((3, 7, 1), (2, 8, 1), (2, 7, 0), (2, 1, 7)):
        assert not torch.equal(mix(FLOATS, LABELS, epoch, batch, rank)[0], images)


@pytest.mark.parametrize(("height", "width"), [(256, 256), (375, 500), (40, 400), (400, 40), (1, 1)])
def test_random_resized_crop_box_matches_vectorized_boxes(height: int, width: int) -> None:
    indices = np.arange(500)
    for scale, ratio in (((0.08, 1.0), (0.75, 4 / 3)), ((0.9, 1.0), (1.0, 1.0)), ((0.3, 0.6), (0.2, 0.9))):
        boxes = random_resized_crop_boxes(scale, ratio, height, width, 7, 3, indices)
        assert boxes.tolist() == [
            list(random_resized_crop_box(scale, ratio, 7, 3, index, height, width)) for index in range(500)
        ]
