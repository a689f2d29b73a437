"""User datasets (`data.dataset=module:name`): supported items, randomness, and the errors of unsupported ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.base.errors import UsageError
from engine.base.exits import exit_status
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.train.data.augment.augmentation import Augmentation
from engine.train.data.batch import Batch
from engine.train.data.checks import class_counts
from engine.train.data.device import InputPipeline
from engine.train.data.inspection_process import ImageCounts, check_user_data_code, try_first_images
from engine.train.data.plan import InputPlan
from engine.train.data.sampler import BatchRequest, DistributedBatchSampler
from engine.train.data.sources.base import UnreadableImageError
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import expected_input_format, open_source, open_source_for_preflight
from engine.train.data.stream import BatchLoader
from support.messages import raises_problem

NUMBERS = itertools.count()
HEAD = """
import random
import numpy as np
import torch
from PIL import Image

class Data:
    def __init__(self, part):
        self.count = 12 if part == "train" else 5
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return self.image(index), index % 3
"""


def config(folder: Path, body: str, *overrides: str, name: str = "Data") -> Config:
    """Return a config whose dataset is `name` of a new module with `HEAD` and `body` as its text."""
    module = f"data_{next(NUMBERS)}"
    (folder / f"{module}.py").write_text(HEAD + body)
    return resolve_config(None, [f"data.dataset={module}:{name}", f"run.code={folder}", *overrides]).config


def method(lines: str) -> str:
    return f"    def image(self, index):\n        {lines}\n"


IMAGE_TYPES = {
    "a PIL image": "return Image.new('RGB', (8, 8), (index, 2, 3))",
    "an array": "return np.broadcast_to(np.array([index, 2, 3], np.uint8), (8, 8, 3))",
    "a tensor": "return torch.tensor([index, 2, 3], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8)",
}


@pytest.mark.parametrize("kind", IMAGE_TYPES)
def test_user_source_accepts_pil_array_and_tensor_images(tmp_path: Path, kind: str) -> None:
    source = open_source(config(tmp_path, method(IMAGE_TYPES[kind])))
    assert (source.num_images("train"), source.num_images("val"), source.classes) == (12, 5, ("0", "1", "2"))
    assert (source.format.size, source.format.channels, source.in_memory) == (8, 3, False)
    images, labels = source.load("train", np.array([7, 2]))
    assert images[:, :, 5, 5].tolist() == [[7, 2, 3], [2, 2, 3]]
    assert (images.shape, labels.tolist()) == ((2, 3, 8, 8), [1, 2])


@pytest.mark.parametrize("shape", ["(8, 8)", "(8, 8, 1)"])
def test_user_source_converts_grayscale_to_requested_channels(tmp_path: Path, shape: str) -> None:
    gray = method(f"return np.full({shape}, 77, np.uint8)")
    source = open_source(config(tmp_path, gray))
    assert (source.load("val", np.array([0]))[0] == np.full((1, 1, 8, 8), 77)).all()
    source = open_source(config(tmp_path, gray, "data.channels=3"))
    assert (source.load("val", np.array([0]))[0] == np.full((1, 3, 8, 8), 77)).all()


def test_user_source_resizes_images_of_different_sizes(tmp_path: Path) -> None:
    text = method("return Image.new('L', (40 + index, 30), index)")
    with raises_problem("missing-value", "data.image_size", ":Data('train') ", " 40 x 30, "):
        open_source(config(tmp_path, text))
    source = open_source(config(tmp_path, text, "data.image_size=16"))
    assert source.load("train", np.arange(12))[0].shape == (12, 1, 16, 16)


def test_user_source_takes_classes_and_targets_without_reading_images(tmp_path: Path) -> None:
    text = """
        self.classes, self.targets = ["ant", "bee", "cow", "dog"], [0, 1, 1, 3] * 3 if self.count == 12 else [2] * 5
    def __getitem__(self, index):
        assert index == 0, "read more than the first item"
        return np.zeros((8, 8), np.uint8), 0
"""
    head = HEAD.index("    def __len__")
    (tmp_path / "named.py").write_text(HEAD[:head] + text + HEAD[head : HEAD.index("    def __getitem__")])
    source = open_source(resolve_config(None, ["data.dataset=named:Data", f"run.code={tmp_path}"]).config)
    assert source.classes == ("ant", "bee", "cow", "dog")
    assert source.get_labels("train").tolist() == [0, 1, 1, 3] * 3
    assert class_counts(source).tolist() == [3, 6, 0, 3]


def test_user_source_infers_classes_from_labels_or_config(tmp_path: Path) -> None:
    text = method("return Image.new('L', (8, 8))")
    assert class_counts(open_source(config(tmp_path, text))).tolist() == [4, 4, 4]
    assert len(open_source(config(tmp_path, text, "data.num_classes=9")).classes) == 9


def test_user_source_passes_data_path(tmp_path: Path) -> None:
    text = method("return Image.new('L', (8, 8))") + "def build(part, path):\n    (path + part).index('x'); "
    text += "return Data(part)\n"
    source = open_source(config(tmp_path, text, "data.path=/some/x", name="build"))
    assert source.num_images("train") == 12
    with raises_problem("missing-value", "data.path", ":build ", "data.path (--data-path)"):
        open_source(config(tmp_path, text, name="build"))


def test_user_source_random_split_is_same_in_every_process(tmp_path: Path) -> None:
    text = (
        method("return Image.new('L', (8, 8), self.order[index])")
        + """
class Shuffled(Data):
    def __init__(self, part):
        super().__init__(part)
        self.order = random.sample(range(256), 6) + np.random.permutation(256)[:6].tolist()
"""
    )
    sources = [open_source(config(tmp_path, text, f"run.seed={seed}", name="Shuffled")) for seed in (1, 1, 2)]
    first, same_seed, other_seed = (source.load("train", np.arange(12))[0] for source in sources)
    assert (first == same_seed).all()
    assert (first != other_seed).any()


def test_user_source_crops_at_original_image_size(tmp_path: Path) -> None:
    crop_config = config(
        tmp_path,
        method("return Image.fromarray(np.arange(160 * 120, dtype=np.uint32).view(np.uint8).reshape(160, 120, 4))"),
        *("data.image_size=16", "augment.resized_crop=true", "augment.crop_scale=[0.1, 0.2]"),
    )
    source = open_source(crop_config)
    calls: list[tuple[int, int, int]] = []
    crop = Augmentation(crop_config, model_input_format(crop_config, source)).preprocessing(1)
    assert crop.random_box is not None

    def record_box(index: int, height: int, width: int) -> tuple[int, int, int, int]:
        calls.append((index, height, width))
        return crop.random_box(index, height, width)

    images, _ = source.load("train", np.array([3]), replace(crop, random_box=record_box))
    assert (images.shape, calls) == ((1, 3, 16, 16), [(3, 160, 120)])


DRAWS = method(
    "return Image.new('RGB', (8, 8), (random.randrange(256), np.random.randint(256), int(torch.randint(256, ()))))"
)


def test_user_source_random_draws_depend_on_seed_epoch_and_item(tmp_path: Path) -> None:
    random_config = config(tmp_path, DRAWS)

    def batches(workers: int, size: int) -> list[Batch]:
        source = open_source(random_config)
        sampler = DistributedBatchSampler(12, 5, size, 0, 1, True, 0)
        return list(
            BatchLoader(source, random_config, model_input_format(random_config, source), sampler.requests(2), workers)
        )

    before = (random.getstate(), torch.get_rng_state())
    without_workers, with_worker, larger_batches = batches(0, 3), batches(1, 3), batches(0, 6)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(
        torch.equal(batch.images, other_batch.images)
        for batch, other_batch in zip(without_workers, with_worker, strict=True)
    )
    assert torch.equal(torch.cat([without_workers[0].images, without_workers[1].images]), larger_batches[0].images)
    assert len({tuple(image[:, 0, 0].tolist()) for batch in without_workers for image in batch.images}) == 12 + 5 + 12


@pytest.mark.parametrize(
    ("body", "name", "code", "values"),
    [
        ("three = 3", "three", "invalid-value", [":three ", " int"]),
        (
            "def build(part): return part.nothing",
            "build",
            "user-code-failed",
            ["build('train') ", "AttributeError: ", ".py, line 14)"],
        ),
        ("def build(part): return []", "build", "no-images", ["build('train') "]),
        ("def build(part): return [7]", "build", "bad-image", ["item 0 ", ":build('train') ", " int"]),
        (
            "def build(part): return [(np.zeros((8, 8, 3)), 0)]",
            "build",
            "bad-image",
            ["item 0 ", " ndarray of float64, 8 x 8 x 3 "],
        ),
        ("def build(part): return [(np.zeros((8, 8), np.uint8), 'cat')]", "build", "bad-image", [" str "]),
        (method("return Image.new('L', (8, 8))") + "Data.classes = 'ab'", "Data", "invalid-value", [" str"]),
        (
            method("return Image.new('L', (8, 8))")
            + "class Two(Data):\n    classes = ['a', 'b']\n    targets = property(lambda self: [2] * self.count)",
            "Two",
            "bad-label",
            ["Two('train') ", " 2, ", "0 to 1"],
        ),
    ],
)
def test_user_source_reports_invalid_dataset_in_one_sentence(
    tmp_path: Path, body: str, name: str, code: str, values: list[str]
) -> None:
    with raises_problem(code, "data.dataset", *values):
        open_source(config(tmp_path, body, name=name))


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        ("raise OSError('the disk\\nis gone')", ["OSError: the disk (", ".py, line 16)"]),
        ("return Image.new('F', (8, 8))", [" F"]),
    ],
)
def test_user_source_names_failing_item(tmp_path: Path, lines: str, values: list[str]) -> None:
    text = method(f"if index != 9: return Image.new('L', (8, 8))\n        {lines}")
    source = open_source(config(tmp_path, text, "data.num_classes=3"))
    with raises_problem("bad-image", "", "item 9 ", ":Data('train') ", *values, kind=UnreadableImageError):
        source.load("train", np.array([8, 9]))


def test_user_source_names_out_of_range_label(tmp_path: Path) -> None:
    source = open_source(config(tmp_path, method("return Image.new('L', (8, 8))"), "data.num_classes=2"))
    with raises_problem("bad-image", "", "item 2 ", " 2, ", "0 to 1", kind=UnreadableImageError):
        source.load("train", np.array([2]))


def test_check_user_data_code_runs_in_subprocess(tmp_path: Path) -> None:
    text = (
        method("print('reading', index); return Image.new('F' if index else 'L', (8, 8), index)") + "print('hello')\n"
    )
    user_config = config(tmp_path, text, "data.batch_size=4", "data.num_classes=3")
    assert check_user_data_code(user_config, 1) == ImageCounts(12, 5)
    with raises_problem("too-large", "data.batch_size", " 16 ", " 4 x 4 "):
        check_user_data_code(user_config, 4)


def test_try_first_images_reports_failure_before_start(tmp_path: Path) -> None:
    float_config = config(tmp_path, method("return Image.new('F', (8, 8))"), "data.num_classes=3", "data.batch_size=4")
    with raises_problem("bad-image", "data.dataset", "item 0 "):
        try_first_images(float_config, 1)
    (tmp_path / "changes.py").write_text("def change(image):\n    return image.float()\n")
    transform_config = resolve_config(None, ["augment.transform=changes:change", f"run.code={tmp_path}"]).config
    with raises_problem("user-code-failed", "augment.transform", "changes:change ", " Tensor of float32, 1 x 8 x 8;"):
        try_first_images(transform_config, 1)


def test_check_user_data_code_reports_process_exit(tmp_path: Path) -> None:
    user_config = config(tmp_path, "import os\nos._exit(7)\n")
    with raises_problem("user-code-failed", "data.dataset", ":Data ", exit_status(7)):
        check_user_data_code(user_config, 1)


def test_check_user_data_code_reports_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.train.data.inspection_process.USER_CODE_TIMEOUT_SECONDS", 2.0)
    user_config = config(tmp_path, "import time\ntime.sleep(1000)\n")
    with raises_problem("timed-out", "data.dataset", ":Data ", " 2 s"):
        check_user_data_code(user_config, 1)


FLOAT_ITEMS = method("return torch.full((5, 8, 8), float(index), dtype=torch.float64)")


def test_float_tensors_reach_the_model_unchanged_with_any_number_of_channels(tmp_path: Path) -> None:
    settings = config(tmp_path, FLOAT_ITEMS, "augment.flip=true", "augment.crop_padding=1")
    source = open_source(settings)
    image_format = model_input_format(settings, source)
    requests = [BatchRequest("val", 0, np.array([1, 4])), BatchRequest("train", 0, np.array([0, 2]))]
    loader = InputPipeline(InputPlan("stream", ""), source, settings, image_format, requests).device_loader(
        torch.device("cpu")
    )
    validation, training = next(loader), next(loader)
    assert validation.images.dtype == torch.float32
    assert torch.equal(validation.images, torch.tensor([1.0, 4.0]).view(2, 1, 1, 1).expand(2, 5, 8, 8))
    assert training.images.shape == (2, 5, 8, 8)
    assert set(training.images[1].unique().tolist()) <= {0.0, 2.0}


def test_float_tensors_refuse_keys_for_uint8_images(tmp_path: Path) -> None:
    settings = config(tmp_path, FLOAT_ITEMS, "data.mean=[0.5]", "augment.resized_crop=true", "data.batch_size=1")
    with pytest.raises(UsageError) as caught:
        try_first_images(settings, 1)
    assert [problem.location for problem in caught.value.problems] == ["data.mean", "augment.resized_crop"]


@pytest.mark.parametrize(
    ("lines", "values", "kind"),
    [
        ("return torch.zeros(5, 8, 9)", [" 5 x 8 x 9, "], UsageError),
        ("return torch.zeros(5, 8, 8 + (index == 1))", ["item 1 ", " 5 x 8 x 9 ", " 5 x 8 x 8"], UnreadableImageError),
        (
            "return torch.zeros(3, 8, 8) if index == 0 else Image.new('RGB', (8, 8))",
            ["item 1 "],
            UnreadableImageError,
        ),
    ],
    ids=["not square", "another shape", "another type"],
)
def test_float_tensors_of_unsupported_shapes_are_refused(
    tmp_path: Path, lines: str, values: list[str], kind: type[UsageError | UnreadableImageError]
) -> None:
    with raises_problem("bad-image", None, *values, kind=kind):
        open_source(config(tmp_path, method(lines))).load("train", np.arange(2))


def test_open_source_for_preflight_does_not_import_user_dataset(tmp_path: Path) -> None:
    user_config = config(tmp_path, "raise SystemExit\n", "data.channels=1")
    assert open_source_for_preflight(user_config) is None
    assert (expected_input_format(user_config).size, expected_input_format(user_config).channels) == (224, 1)
