"""WebDataset: tar shards as a dataset."""

from __future__ import annotations

import json
import math
import os
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.train.data.decoded import load_in_memory
from engine.train.data.sources import webdataset
from engine.train.data.sources.base import UnreadableImageError
from engine.train.data.sources.open import open_source, read_class_names
from engine.train.data.sources.webdataset import TarSource, expand_braces
from support.data.tar_shards import encode_image, sample_members, write_shard, write_shards
from support.messages import raises_problem

Members = Sequence[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gputrain"


def open_shards(pattern: str, *overrides: str) -> TarSource:
    shards = ["data.dataset=webdataset", f"data.path={pattern}", "data.image_size=16"]
    source = open_source(resolve_config(None, [*shards, *overrides]).config)
    assert isinstance(source, TarSource)
    return source


def open_members(tmp_path: Path, members: Members, *overrides: str) -> TarSource:
    return open_shards(str(write_shard(tmp_path / "one.tar", members)), "data.val_split=0.5", *overrides)


def contents(source: TarSource) -> dict[str, bytes]:
    return {
        name: source.read_encoded(part, index)
        for part in ("train", "val")
        for index, name in enumerate(source.image_names(part))
    }


def test_tar_source_reads_images_and_labels_of_all_shards(tmp_path: Path) -> None:
    source = open_shards(write_shards(tmp_path, shards=3, images=8))
    assert (source.num_images("train"), source.num_images("val"), source.classes) == (20, 4, ("0", "1"))
    assert contents(source) == {
        f"train-{number // 8:03d}.tar/{number:04d}.png": encode_image(number) for number in range(24)
    }
    numbers = [int(name[-8:-4]) for name in source.image_names("train")]
    assert source.get_labels("train").tolist() == [number % 2 for number in numbers]
    images, labels = source.load("train", np.array([3, 1]))
    assert (images.shape, labels.tolist()) == ((2, 3, 16, 16), source.get_labels("train")[[3, 1]].tolist())


def test_tar_source_takes_validation_shards(tmp_path: Path) -> None:
    train, val = write_shards(tmp_path), write_shards(tmp_path, shards=1, first=100, name="val")
    source = open_shards(train, f"data.val_path={val}")
    assert (source.num_images("train"), source.num_images("val")) == (24, 8)
    assert source.image_names("val")[0] == "val-000.tar/0100.png"


def test_tar_source_skips_members_without_content(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "t.tar", sample_members(range(8)))
    with tarfile.open(path, "a", pax_headers={"comment": "global"}, format=tarfile.PAX_FORMAT) as archive:
        for name, kind in (("link.png", tarfile.SYMTYPE), ("pipe.png", tarfile.FIFOTYPE), ("c", tarfile.CHRTYPE)):
            (member := tarfile.TarInfo(name)).type = kind
            archive.addfile(member)
    source = open_shards(str(path))
    assert source.num_images("train") + source.num_images("val") == 8
    skipped = [name.partition(" (")[0] for name in source.skipped]
    assert skipped == [f"{path}: {name}" for name in ("link.png", "pipe.png", "c")]


def test_tar_source_skips_samples_without_one_image(tmp_path: Path) -> None:
    extra = [("x.jpg", b""), ("x.png", b""), ("x.cls", b"0"), ("y.cls", b"0"), ("README", b""), ("__m__.json", b"{}")]
    source = open_members(tmp_path, [*sample_members(range(8)), *extra])
    skipped = [name.removeprefix(f"{tmp_path}/one.tar: ") for name in source.skipped]
    assert [name.partition(" (")[0] for name in skipped] == ["x", "y"]


def test_tar_source_reads_label_from_json(tmp_path: Path) -> None:
    metadata = {"similarity": math.nan, "caption": "\ud83d", "tags": [[]]}
    members: list[tuple[str, bytes]] = []
    for number in range(8):
        label = json.dumps(metadata | {"label": number % 2}).encode()
        members += [(f"{number}.json", label), (f"{number}.JPEG", encode_image(number))]
    source = open_members(tmp_path, members)
    assert sorted(source.get_labels("train").tolist()) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("members", "code", "values"),
    [
        ([("a/1.png", b"")], "bad-label", ["/one.tar ", " a/1.png ", " .cls "]),
        ([("1.png", b""), ("1.cls", b"cat")], "bad-label", [" 1.cls "]),
        ([("1.png", b""), ("1.cls", b"-1")], "bad-label", [" 1.cls "]),
        ([("1.png", b""), ("1.cls", b"9" * 20)], "bad-label", [" 1.cls "]),
        ([("1.png", b""), ("1.json", b"[" * 9999)], "bad-label", [" 1.json "]),
        ([("1.png", b""), ("1.json", b'{"label": true}')], "bad-label", [" 1.json "]),
        ([("1.png", b""), ("1.png", b"")], "duplicate-key", [" 1.png "]),
        ([("\x1b[2J.png", b"")], "bad-label", [r" \x1b[2J.png "]),
        ([("1.txt", b"")], "no-images", []),
        ([("1.png", b""), ("1.cls", b"2000000")], "too-many", [" 2000000, ", " 1,048,576 "]),
    ],
)
def test_tar_source_refuses_samples_in_one_sentence(
    tmp_path: Path, members: Members, code: str, values: list[str]
) -> None:
    with raises_problem(code, "data.path", *values):
        open_members(tmp_path, members)


@pytest.mark.parametrize(
    ("content", "code", "value"),
    [
        (b"\x1f\x8b" + bytes(600), "damaged", "decompress"),
        (b"hello", "damaged", "/x.tar "),
        (bytes(1024), "no-images", ""),
    ],
)
def test_tar_source_refuses_what_is_no_tar_archive(tmp_path: Path, content: bytes, code: str, value: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    with raises_problem(code, "data.path", value):
        open_shards(str(path))


@pytest.mark.parametrize("size", [100, 512, 700, 20_000, -1024])
def test_tar_source_refuses_truncated_shard(tmp_path: Path, size: int) -> None:
    path = write_shard(tmp_path / "x.tar", sample_members(range(20)))
    with tarfile.open(path) as archive:
        end = archive.getmembers()[-1].offset_data + 512
    os.truncate(path, size if size > 0 else end)
    with raises_problem("damaged", "data.path", f" {path} "):
        open_shards(str(path))


def test_tar_source_names_missing_shards(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, shards=3)
    missing = f"({tmp_path}/train-003.tar, {tmp_path}/train-004.tar)"
    with raises_problem("not-found", "data.path", "2 of 5 ", missing):
        open_shards(pattern.replace("002", "004"))
    with raises_problem("too-many", "data.path", " 65,536 "):
        open_shards("x-{0..999999999}.tar")


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "{" * 20, "/proc/self/mem/x.tar"])
def test_tar_source_refuses_impossible_path_in_one_sentence(path: str) -> None:
    config = resolve_config(None, ["data.dataset=webdataset", "data.path=x"]).config
    data = config.data.model_copy(update={"path": path})
    with pytest.raises(UsageError):
        open_source(config.model_copy(update={"data": data}))


def test_tar_source_reports_shard_that_changes_during_run(tmp_path: Path) -> None:
    source = open_shards(write_shards(tmp_path, shards=1))
    source.load("train", np.array([0]))
    write_shard(tmp_path / "new", sample_members(range(8, 16)))
    (tmp_path / "train-000.tar").write_bytes((tmp_path / "new").read_bytes())
    with raises_problem("bad-image", "", f" {tmp_path / 'train-000.tar'} ", kind=UnreadableImageError):
        source.load("train", np.array([0]))


def test_tar_source_bounds_open_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = lru_cache(maxsize=2)(webdataset._open_cached.__wrapped__)
    monkeypatch.setattr(webdataset, "_open_cached", opened)
    source = open_shards(write_shards(tmp_path, shards=5))
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert len(contents(source)) == 40
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2


def test_tar_index_is_made_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = write_shards(tmp_path)
    fingerprint = open_shards(pattern).fingerprint("train")
    assert cache.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:
        patch.setattr("engine.train.data.sources.tar_index._build_index", None)
        assert open_shards(pattern).fingerprint("train") == fingerprint
    write_shard(tmp_path / "train-001.tar", sample_members(range(50, 58)))
    assert open_shards(pattern).fingerprint("train") != fingerprint


def test_tar_index_is_made_again_if_damaged_or_writable_by_others(tmp_path: Path, cache: Path) -> None:
    pattern = write_shards(tmp_path, shards=1)
    expected = contents(open_shards(pattern))
    (file,) = (cache / "shards").iterdir()
    intact = file.read_bytes()
    for content in (b"", intact[:-1], intact[:300] + b"x" + intact[301:], b"PK" + intact[:100]):
        file.write_bytes(content)
        assert contents(open_shards(pattern)) == expected
        assert len(file.read_bytes()) == len(intact)
    (cache / "shards").chmod(0o777)
    file.write_bytes(b"forged")
    assert contents(open_shards(pattern)) == expected


def test_tar_source_prints_progress_of_indexing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.train.data.sources.tar_index.PROGRESS_SECONDS", 0.0)
    open_shards(write_shards(tmp_path, shards=3))
    assert capsys.readouterr().err.splitlines()[0] == f"indexing {tmp_path} once: 1 of 3 shards"


def test_tar_source_finds_parts_by_the_names_of_shards_in_a_folder(tmp_path: Path) -> None:
    write_shards(tmp_path, shards=2)
    assert open_shards(str(tmp_path)).num_images("val") == 4, "the training shards are split"
    write_shards(tmp_path, shards=1, name="val")
    write_shards(tmp_path, shards=1, name="test")
    source = open_shards(str(tmp_path))
    assert (source.num_images("train"), source.num_images("val")) == (16, 8)
    assert source.skipped[0].startswith(f"{tmp_path}/test-000.tar (")
    with raises_problem("not-found", "data.path", str(tmp_path / "cache")):
        open_shards(str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{a,b}-{0..1}.tar", ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]),
        ("a{b}.tar", ["a{b}.tar"]),
        ("{2..1}.tar", []),
    ],
)
def test_expand_braces_names_shards_as_webdataset_does(pattern: str, names: list[str]) -> None:
    assert list(expand_braces(pattern)) == names


def test_tar_source_takes_class_names_from_file_beside_shards(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert open_shards(pattern).classes == ("cat", "dog")
    config = resolve_config(None, ["data.dataset=webdataset", f"data.path={pattern}"]).config
    assert read_class_names(config) == ("cat", "dog")
    (tmp_path / "classes.txt").write_text("cat\n")
    with raises_problem("bad-label", "data.path", f"{tmp_path / 'classes.txt'} ", " 1 ", "0001.png"):
        open_shards(pattern)


def test_tar_source_makes_class_names_distinct(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("missile\ndog\nmissile\n")
    source = open_members(tmp_path, sample_members(range(9), classes=3))
    assert source.classes == ("missile (0)", "dog", "missile (2)")


def test_tar_source_keeps_empty_classes_if_allowed(tmp_path: Path) -> None:
    source = open_members(tmp_path, sample_members(range(8)), "data.num_classes=4", "data.allow_empty=true")
    assert source.classes == ("0", "1", "2", "3")


def test_tar_images_are_kept_in_memory_and_cached(tmp_path: Path, cache: Path) -> None:
    pattern = write_shards(tmp_path)
    config = resolve_config(None, ["data.dataset=webdataset", f"data.path={pattern}", "data.image_size=16"]).config
    source = open_source(config)
    loaded = load_in_memory(source, config, source.format)
    assert np.array_equal(loaded.images["val"], source.load("val", np.arange(4))[0])
    assert len(list((cache / "decoded").glob("*.npy"))) == 2
