"""The cache of decoded images: concurrent writers, reuse, invalidation, eviction and write errors."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.train.data.checks import build_sampler
from engine.train.data.device import InputPipeline
from engine.train.data.plan import InputPlan
from engine.train.data.sources import decoded_cache
from engine.train.data.sources.base import UnreadableImageError
from engine.train.data.sources.decoded_cache import DecodedChunks, DecodedMetadata, compute_cache_key, load_or_decode
from engine.train.data.sources.formats import model_input_format
from support.data.device_batches import CPU, assert_the_same, batches
from support.data.photo_folder import open_photo_folder, write_photo_folder
from support.messages import has_problem, raises_problem

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photo_folder(tmp_path / "photos")


def test_decoded_cache_is_reused(photos: Path, cache: Path) -> None:
    assert_the_same(batches("memory", *open_photo_folder(photos)), batches("stream", *open_photo_folder(photos)))
    written = {path: path.stat().st_mtime_ns for path in cache.glob("*.npy")}
    assert not batches("memory", *open_photo_folder(photos))[0].images.requires_grad
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.npy")} == written and len(written) == 2


def test_decoded_cache_is_invalidated_by_changed_file(photos: Path, cache: Path) -> None:
    before = batches("memory", *open_photo_folder(photos))
    for path in photos.rglob("*.png"):
        Image.new("RGB", (20, 24), "red").save(path)
    after = batches("memory", *open_photo_folder(photos))
    assert len(list(cache.glob("*.npy"))) == 4
    assert not torch.equal(before[0].images, after[0].images)
    assert_the_same(after, batches("stream", *open_photo_folder(photos)))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "overwritten": lambda file: file.write_bytes(b"\x93NUMPY not at all"),
    "deleted": Path.unlink,
    "metadata": lambda file: file.with_suffix(".json").write_text('{"file": 3}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_decoded_cache_is_rebuilt_when_damaged(damage: str, photos: Path, cache: Path) -> None:
    expected = batches("memory", *open_photo_folder(photos))
    array_files = sorted(cache.glob("*.npy"))
    for file in array_files:
        DAMAGES[damage](file)
    assert_the_same(batches("memory", *open_photo_folder(photos)), expected)
    assert sum(len(np.load(file, allow_pickle=False)) for file in array_files) == 16


def test_decoded_cache_is_written_by_one_of_several_processes(tmp_path: Path) -> None:
    metadata = DecodedMetadata(unread={1: "why"}, labels={"val": (0, 1)}, classes=("a", "b"))

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


def test_decoded_cache_is_read_from_read_only_folder(cache: Path) -> None:
    load_or_decode("k", lambda: DecodedChunks((1, 1, 2, 2), [np.ones((1, 1, 2, 2), np.uint8)]))
    (cache / "k.lock").unlink()
    # A folder in place of the lock file fails even for root, whom file permissions do not stop.
    (cache / "k.lock").mkdir()
    assert load_or_decode("k", lambda: pytest.fail("the cached entry was not used")).warning is None


def test_decoded_cache_failed_write_leaves_no_file(photos: Path, cache: Path) -> None:
    config, source = open_photo_folder(photos)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        loaded = batches("memory", config, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_the_same(loaded, batches("stream", config, source))
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_memory_pipeline_without_cache_warns_and_decodes_into_memory(
    photos: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = batches("memory", *open_photo_folder(photos))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/full")
    config, source = open_photo_folder(photos)
    requests = build_sampler(config, source, 1).requests(2)
    pipeline = InputPipeline(InputPlan("memory", ""), source, config, model_input_format(config, source), requests)
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
    load_or_decode("used", lambda: pytest.fail("the cached entry was not used"))
    load_or_decode("new", decode)
    assert {path.name for path in cache.glob("*.*y")} == {"used.npy", "new.npy"}
    assert not (cache / "old.json").exists()


@pytest.mark.parametrize("library", ["pillow", "simplejpeg", "torch", "torchvision"])
def test_cache_key_depends_on_library_versions(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = compute_cache_key({}, [], str(tmp_path))
    installed = decoded_cache.installed_version
    monkeypatch.setattr(decoded_cache, "installed_version", lambda name: "0.1" if name == library else installed(name))
    assert compute_cache_key({}, [], str(tmp_path)) != key


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
