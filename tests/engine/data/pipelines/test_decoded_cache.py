"""The cache of decoded images: concurrent writers, reuse, invalidation, eviction and write errors."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.data.batching import build_sampler
from engine.data.pipelines.choose import PipelineChoice
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.sources import decoded_cache
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.decoded_cache import DecodedChunks, DecodedMetadata, compute_cache_key, load_or_decode
from engine.data.sources.formats import model_input_format
from support.data.device_batches import CPU, assert_the_same, batches
from support.data.photo_folder import open_photo_folder, write_photo_folder
from support.messages import has_problem, raises_problem

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photo_folder(tmp_path / "photos")


def test_decoded_cache_is_reused_for_any_seed_and_split(photos: Path, cache: Path) -> None:
    assert_the_same(batches("memory", *open_photo_folder(photos)), batches("stream", *open_photo_folder(photos)))
    (array_file,) = cache.glob("*.npy")
    written = array_file.stat().st_mtime_ns
    other = open_photo_folder(photos, "run.seed=5", "data.val_split=0.5")
    assert_the_same(batches("memory", *other), batches("stream", *other))
    assert [path.stat().st_mtime_ns for path in cache.glob("*.npy")] == [written]
    assert not batches("memory", *open_photo_folder(photos))[0].images.requires_grad


def test_decoded_cache_is_invalidated_by_changed_file(photos: Path, cache: Path) -> None:
    before = batches("memory", *open_photo_folder(photos))
    for path in photos.rglob("*.png"):
        Image.new("RGB", (20, 24), "red").save(path)
    after = batches("memory", *open_photo_folder(photos))
    assert len(list(cache.glob("*.npy"))) == 2
    assert not torch.equal(before[0].images, after[0].images)
    assert_the_same(after, batches("stream", *open_photo_folder(photos)))


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _overwrite(file: Path) -> None:
    file.write_bytes(b"\x93NUMPY not at all")


def _replace_with_other_shape(file: Path) -> None:
    size = file.stat().st_size
    np.save(file, np.zeros(size // 2, np.uint8))


def _delete(file: Path) -> None:
    file.unlink()


def _damage_metadata(file: Path) -> None:
    file.with_suffix(".json").write_text('{"file": 3}')


def _damage_header(file: Path) -> None:
    """Change a byte of the header, but neither size nor modification time."""
    status = file.stat()
    with file.open("r+b") as array:
        array.seek(8)
        array.write(b"\1")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def _damage_unread(file: Path) -> None:
    metadata = json.loads(file.with_suffix(".json").read_text())
    metadata["metadata"]["unread"] = {"99999999": "why"}
    file.with_suffix(".json").write_text(json.dumps(metadata))


def _change_bytes(file: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change bytes of an entry like a disk error does, without changing its size and modification time."""
    status = file.stat()
    mapped = np.load(file, mmap_mode="r+")
    change(mapped.reshape(-1))
    mapped.flush()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def _zero_page(file: Path) -> None:
    _change_bytes(file, lambda images: images[4096:8192].fill(0))


def _swap_pages(file: Path) -> None:
    def change(images: np.ndarray) -> None:
        images[:8192] = np.concatenate([images[4096:8192], images[:4096]])

    _change_bytes(file, change)


def _change_format(file: Path) -> None:
    metadata = json.loads(file.with_suffix(".json").read_text())
    file.with_suffix(".json").write_text(json.dumps(metadata | {"format": 2}))


def _remove_checksum(file: Path) -> None:
    metadata = json.loads(file.with_suffix(".json").read_text())
    del metadata["checksum"]
    file.with_suffix(".json").write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    "damage",
    [
        *(_truncate, _overwrite, _replace_with_other_shape, _delete, _damage_metadata),
        *(_damage_header, _damage_unread),
        *(_zero_page, _swap_pages, _remove_checksum, _change_format),
    ],
)
def test_decoded_cache_is_rebuilt_when_damaged(damage: object, photos: Path, cache: Path) -> None:
    assert callable(damage)
    expected = batches("memory", *open_photo_folder(photos))
    (array_file,) = cache.glob("*.npy")
    damage(array_file)
    assert_the_same(batches("memory", *open_photo_folder(photos)), expected)
    assert np.load(array_file, allow_pickle=False).shape == (16, 3, 16, 16)


@pytest.mark.parametrize("position", [0, 4095, 4096, 4999])
def test_decoded_cache_is_rebuilt_after_change_of_any_bit(position: int, cache: Path) -> None:
    decoded = list[int]()

    def decode() -> DecodedChunks:
        decoded.append(1)
        return DecodedChunks((1, 1, 50, 100), [np.full((1, 1, 50, 100), 7, np.uint8)])

    def flip(images: np.ndarray) -> None:
        images[position] ^= 1

    load_or_decode("k", decode)
    _change_bytes(cache / "k.npy", flip)
    assert int(load_or_decode("k", decode).images.sum()) == 7 * 5000
    load_or_decode("k", decode)
    assert len(decoded) == 2


def test_decoded_cache_is_written_by_one_of_several_processes(tmp_path: Path) -> None:
    metadata = DecodedMetadata(unread={1: "why"}, reduced=(0,), labels={"val": (0, 1)}, classes=("a", "b"))

    def decode() -> DecodedChunks:
        (tmp_path / f"decoded-by-{os.getpid()}").touch()
        time.sleep(0.3)
        return DecodedChunks((2, 1, 2, 2), [np.full((2, 1, 2, 2), 7, np.uint8)], lambda: metadata)

    def load() -> None:
        decoded = load_or_decode("k", decode)
        if (int(decoded.images.sum()), decoded.metadata, decoded.warning) == (56, metadata, None):
            (tmp_path / f"loaded-by-{os.getpid()}").touch()

    processes = [multiprocessing.get_context("fork").Process(target=load) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert len(list(tmp_path.glob("decoded-by-*"))) == 1
    assert len(list(tmp_path.glob("loaded-by-*"))) == 3


def test_decoded_cache_ignores_interrupted_write(cache: Path) -> None:
    def interrupted_chunks() -> Iterator[np.ndarray]:
        yield np.zeros((1, 1, 2, 2), np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_decode("k", lambda: DecodedChunks((2, 1, 2, 2), interrupted_chunks()))
    decoded = load_or_decode("k", lambda: DecodedChunks((1, 1, 2, 2), [np.ones((1, 1, 2, 2), np.uint8)]))
    assert int(decoded.images.sum()) == 4


def test_decoded_cache_removes_leftovers_of_killed_writer_of_same_key(cache: Path) -> None:
    def chunks() -> Iterator[np.ndarray]:
        yield np.zeros((1, 1, 2, 2), np.uint8)
        os.kill(os.getpid(), signal.SIGKILL)

    fork = multiprocessing.get_context("fork")
    for key in ("k", "other"):
        writer = fork.Process(target=load_or_decode, args=(key, lambda: DecodedChunks((2, 1, 2, 2), chunks())))
        writer.start()
        writer.join(20)
        assert writer.exitcode == -signal.SIGKILL
    assert len(list(cache.glob(".k.npy.*.tmp"))) == 1
    load_or_decode("k", lambda: DecodedChunks((1, 1, 2, 2), [np.ones((1, 1, 2, 2), np.uint8)]))
    assert [path.name.split(".")[1] for path in cache.glob(".*.tmp")] == ["other"]


def test_decoded_cache_without_space_decodes_after_releasing_lock(cache: Path) -> None:
    is_unlocked = list[bool]()

    def chunks() -> Iterator[np.ndarray]:
        with (cache / "k.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_unlocked.append(True)
            except BlockingIOError:
                is_unlocked.append(False)
        yield np.ones((1, 1, 99, 99), np.uint8)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        decoded = load_or_decode("k", lambda: DecodedChunks((1, 1, 99, 99), chunks()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (is_unlocked, int(decoded.images.sum())) == ([True], 99 * 99)
    assert decoded.warning is not None
    assert has_problem([decoded.warning], "not-writable", "", f" {cache} ({os.strerror(errno.EFBIG)})")


def test_decoded_cache_is_read_from_read_only_folder(cache: Path) -> None:
    load_or_decode("k", lambda: DecodedChunks((1, 1, 2, 2), [np.ones((1, 1, 2, 2), np.uint8)]))
    (cache / "k.lock").unlink()
    # A folder in place of the lock file fails even for root, whom file permissions do not stop.
    (cache / "k.lock").mkdir()
    assert load_or_decode("k", lambda: pytest.fail("the cached entry was not used")).warning is None


def test_decoded_cache_failed_write_leaves_no_file(photos: Path, cache: Path) -> None:
    config, source = open_photo_folder(photos)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        loaded = batches("memory", config, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_the_same(loaded, batches("stream", config, source))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_memory_pipeline_without_cache_warns_and_decodes_into_memory(
    photos: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = batches("memory", *open_photo_folder(photos))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/full")
    config, source = open_photo_folder(photos)
    requests = build_sampler(config, source, 1).requests(2)
    pipeline = InputPipeline(PipelineChoice("memory", ""), source, config, model_input_format(config, source), requests)
    [warning] = pipeline.warnings
    value = f" /dev/full/gputrain/decoded ({os.strerror(errno.ENOTDIR)})"
    assert has_problem([warning], "not-writable", "", value)
    assert torch.equal(next(pipeline.device_loader(CPU)).images, expected[0].images)


def test_decoded_cache_evicts_entries_unused_for_a_month(cache: Path) -> None:
    def decode() -> DecodedChunks:
        return DecodedChunks((1, 1, 2, 2), [np.ones((1, 1, 2, 2), np.uint8)])

    for key in ("old", "used"):
        load_or_decode(key, decode)
    expired = time.time() - 31 * 86400
    for path in cache.iterdir():
        os.utime(path, (expired, expired))
    # The metadata records the modification time of the array, so changing one invalidates the other.
    for key in ("old", "used"):
        metadata = json.loads((cache / f"{key}.json").read_text())
        metadata["mtime_ns"] = (cache / f"{key}.npy").stat().st_mtime_ns
        (cache / f"{key}.json").write_text(json.dumps(metadata))
        os.utime(cache / f"{key}.json", (expired, expired))
    load_or_decode("used", lambda: pytest.fail("the cached entry was not used"))
    load_or_decode("new", decode)
    assert {path.name for path in cache.glob("*.*y")} == {"used.npy", "new.npy"}
    assert not (cache / "old.json").exists()


def test_cache_key_depends_on_file_size_and_mtime(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one")
    key = compute_cache_key({"n": 1}, [file], tmp_path)
    assert compute_cache_key({"n": 1}, [file], tmp_path) == key != compute_cache_key({"n": 2}, [file], tmp_path)
    os.utime(file, ns=(1, 1))
    assert compute_cache_key({"n": 1}, [file], tmp_path) != key


@pytest.mark.parametrize("library", ["pillow", "simplejpeg", "torch", "torchvision"])
def test_cache_key_depends_on_library_versions(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = compute_cache_key({}, [], tmp_path)
    installed = decoded_cache.installed_version
    monkeypatch.setattr(decoded_cache, "installed_version", lambda name: "0.1" if name == library else installed(name))
    assert compute_cache_key({}, [], tmp_path) != key


def test_memory_pipeline_skips_unreadable_image_and_retries(photos: Path, cache: Path) -> None:
    config, source = open_photo_folder(photos, "data.on_bad=skip")
    broken = photos / "cat" / "3.png"
    content, status = broken.read_bytes(), broken.stat()
    broken.write_bytes(b"\0" * len(content))
    os.utime(broken, ns=(status.st_atime_ns, status.st_mtime_ns))
    loaded = batches("memory", config, source)
    assert_the_same(loaded, batches("stream", config, source))
    assert sum(len(batch.unread) for batch in loaded) == 2
    with raises_problem("bad-image", "", f" {broken} ", kind=UnreadableImageError):
        batches("memory", config.model_copy(update={"data": config.data.model_copy(update={"on_bad": "fail"})}), source)
    broken.write_bytes(content)
    os.utime(broken, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not any(batch.unread for batch in batches("memory", config, source))
