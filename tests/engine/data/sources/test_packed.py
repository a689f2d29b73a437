"""Training from a packed set: the same images, order and batches as from the folder."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.data.pack.pack_file import CHUNK_ROWS
from engine.data.pack.reencode import DEFAULT_QUALITY, Encoding
from engine.data.pipelines.batch import Batch
from engine.data.pipelines.in_memory_images import load_in_memory
from engine.data.pipelines.loader import BatchLoader
from engine.data.sampler import PARTS, DistributedBatchSampler
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.formats import expected_input_format, model_input_format
from engine.data.sources.open import open_source, read_class_names
from engine.data.sources.packed import PackedNames, PackedSource
from engine.doctor.dataset import open_dataset
from support.data.packed_photos import pack_photos, write_photos
from support.messages import raises_problem

SMALL = ["data.image_size=16", "data.batch_size=4", "data.val_split=0.25"]
AUGMENTED = ["augment.resized_crop=true", "augment.flip=true", "augment.brightness=0.3"]


@pytest.fixture(scope="module", params=[False, True], ids=["split", "with val"])
def datasets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder, and its packed set with the files as they are."""
    folder = tmp_path_factory.mktemp("datasets")
    photos = write_photos(folder / "photos", validation=request.param)
    pack_photos(photos, folder / "photos.gpk")
    return photos, folder / "photos.gpk"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pack_photos(write_photos(folder / "photos"), folder / "photos.gpk", Encoding(max_side=40, quality=DEFAULT_QUALITY))
    return folder / "photos.gpk"


def open_config(dataset: str, path: Path, *overrides: str) -> tuple[Config, EncodedSource]:
    config = resolve_config(
        None, [f"data.dataset={dataset}", f"data.path={path}", *SMALL, *(overrides or AUGMENTED)]
    ).config
    source = open_source(config)
    assert isinstance(source, EncodedSource)
    return config, source


def load_batches(config: Config, source: EncodedSource, workers: int, first_step: int = 0) -> list[Batch]:
    image_format = model_input_format(config, source)
    counts = [source.num_images(part) for part in PARTS]
    sampler = DistributedBatchSampler(*counts, 4, 0, 1, True, config.run.seed)
    return list(BatchLoader(source, config, image_format, sampler.requests(1, 1, first_step), workers))


def assert_same(batches: list[Batch], others: list[Batch]) -> None:
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.labels, other.labels)


def test_packed_files_give_same_batches_as_folder(datasets: tuple[Path, Path]) -> None:
    photos, file = datasets
    assert_same(load_batches(*open_config("folder", photos), 0), load_batches(*open_config("packed", file), 0))


def test_packed_files_have_fingerprint_and_names_of_folder(datasets: tuple[Path, Path]) -> None:
    photos, file = datasets
    for part in PARTS:
        (_, folder), (_, packed) = open_config("folder", photos), open_config("packed", file)
        assert packed.fingerprint(part) == folder.fingerprint(part)  # type: ignore[attr-defined]
        assert list(packed.image_names(part)) == list(folder.image_names(part))
        assert packed.image_names(part)[3] == folder.image_names(part)[3]
        assert len(packed.image_names(part)) == packed.num_images(part)


@pytest.mark.parametrize("worker_type", ["threads", "processes"])
@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_packed_batches_after_resume_continue_epoch(workers: int, worker_type: str, packed: Path) -> None:
    overrides = ["augment.resized_crop=true", "augment.flip=true", f"data.worker_type={worker_type}"]
    config, source = open_config("packed", packed, *overrides)
    whole = load_batches(config, source, 0)
    assert_same(load_batches(config, source, workers, first_step=2), whole[2:])


def test_packed_source_is_small_when_pickled_and_loads_same_images(packed: Path) -> None:
    _, source = open_config("packed", packed)
    copied = pickle.loads(pickle.dumps(source))
    indices = np.arange(5)
    assert np.array_equal(copied.load("train", indices)[0], source.load("train", indices)[0])


def test_byte_ranges_are_those_of_contents(packed: Path) -> None:
    _, source = open_config("packed", packed)
    assert isinstance(source, PackedSource)
    indices = np.array([4, 0, 7])
    offsets, sizes = source.byte_ranges("train", indices)
    data = packed.read_bytes()
    for index, offset, size in zip(indices.tolist(), offsets, sizes, strict=True):
        assert data[offset : offset + size] == source.read_encoded("train", index).data


def test_storage_order_mixes_classes_and_ascends_in_file(packed: Path) -> None:
    _, source = open_config("packed", packed)
    assert isinstance(source, PackedSource)
    order = source.in_storage_order("train", np.arange(source.num_images("train")))
    assert (np.diff(source.byte_ranges("train", order)[0]) > 0).all()
    assert len(np.unique(np.flatnonzero(np.diff(source.get_labels("train")[order])))) > 3


def test_damaged_image_is_skipped_and_named(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gpk").write_bytes(packed.read_bytes())
    config, source = open_config("packed", tmp_path / "a.gpk", "data.on_bad=skip")
    assert isinstance(source, PackedSource)
    offset = source.byte_ranges("train", np.array([3]))[0][0]
    with (tmp_path / "a.gpk").open("r+b") as file:
        file.seek(offset + 40)
        file.write(b"\0\1\2\3")
    with raises_problem("bad-image", "", "a.gpk: ", "(image ", kind=UnreadableImageError):
        source.load("train", np.array([3]))
    unread = [name for batch in load_batches(config, source, 0) for name in batch.unread]
    assert len(unread) == 1


def test_class_without_image_is_refused_unless_allowed(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    (photos / "fox").mkdir()
    pack_photos(photos, tmp_path / "a.gpk", allow_empty=True)
    with raises_problem("empty-class", "data.path", "(fox)", "data.allow_empty=true"):
        open_config("packed", tmp_path / "a.gpk")
    _, source = open_config("packed", tmp_path / "a.gpk", "data.allow_empty=true")
    assert source.classes == ("cat", "dog", "fox")  # type: ignore[attr-defined]


def test_packed_images_are_kept_in_memory_and_shared(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, source = open_config("packed", packed, "data.pipeline=memory")
    image_format = model_input_format(config, source)
    images = load_in_memory(source, config, image_format)
    expected = source.load("val", np.arange(source.num_images("val")))[0]
    assert np.array_equal(images.images["val"][images.rows["val"]], expected)
    monkeypatch.setattr(PackedSource, "load", None)
    assert np.array_equal(load_in_memory(source, config, image_format).images["val"], images.images["val"])


def test_packed_dataset_is_described(packed: Path) -> None:
    config, source = open_config("packed", packed)
    dataset = open_dataset(config)
    assert dataset.files is not None
    assert dataset.files.modes == {"JPEG RGB": source.num_images("train") + source.num_images("val")}
    assert read_class_names(config.data) == ("cat", "dog")
    assert expected_input_format(config).size == 16


def test_names_of_more_rows_than_one_chunk(packed: Path) -> None:
    _, source = open_config("packed", packed)
    assert isinstance(source, PackedSource)
    names = [*source.pack.names(0, source.pack.num_images)]
    rows = np.sort(np.arange(CHUNK_ROWS + 100) % source.pack.num_images).astype(np.uint32)
    assert list(PackedNames(source.pack, rows)) == [names[row] for row in rows]
