"""Reading a packed set: damage is found and named, and no file can mislead the reader."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from engine.data.pack import verify
from engine.data.pack.pack_file import (
    HEADER_BYTES,
    PACK_AGAIN,
    InvalidPackError,
    Pack,
    PackInfo,
    open_pack,
    write_index,
)
from engine.data.pack.verify import damaged_images
from engine.data.sources.base import UnreadableImageError
from engine.utils.errors import UsageError
from support.data.packed_photos import NUM_PHOTOS, pack_photos, write_photos
from support.messages import has_problem, raises_problem


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pack_photos(write_photos(folder / "photos"), folder / "photos.gpk")
    return folder / "photos.gpk"


@pytest.fixture
def packed(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "photos.gpk"))


def test_packed_set_begins_with_magic_and_version(original: Path) -> None:
    assert original.read_bytes()[:12] == b"\x89GPK\r\n\x1a\n\x01\x00\x00\x00"


def flip_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 0x40]))


def damaged(path: Path) -> list[str]:
    return list(damaged_images(Pack(str(path)), lambda _: None))


def test_flipped_byte_of_image_is_found_and_named_on_read(packed: Path) -> None:
    pack = Pack(str(packed))
    row = 12
    flip_byte(packed, int(pack.offsets[row]) + 30)
    with raises_problem("bad-image", "", f"photos.gpk: {pack.name(row)} (image {row}) ", kind=UnreadableImageError):
        pack.read(row)
    assert pack.read(row - 1)


def test_verify_names_each_damaged_image(packed: Path) -> None:
    pack = Pack(str(packed))
    assert damaged(packed) == []
    for row in (3, 17):
        flip_byte(packed, int(pack.offsets[row]))
    problems = damaged(packed)
    assert len(problems) == 2
    assert {row for row in range(NUM_PHOTOS) if f"(image {row})" in " ".join(problems)} == {
        3,
        17,
    }


def test_verify_reports_progress_and_stops_on_request(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "BATCH_IMAGES", 10)
    progress: list[int] = []
    pack = Pack(str(packed))
    assert list(damaged_images(pack, progress.append)) == []
    assert progress == [10, 20, NUM_PHOTOS]
    list(damaged_images(pack, progress.append, lambda: len(progress) == 5))
    assert progress[3:] == [10, 20]


def test_flipped_byte_anywhere_is_found(packed: Path) -> None:
    """In the header, between header and index, and in the index with names, classes and options."""
    size = packed.stat().st_size
    index = Pack(str(packed)).index_offset
    for position in [*range(HEADER_BYTES), *range(HEADER_BYTES, index, 997), *range(index, size, 23), size - 1]:
        flip_byte(packed, position)
        with suppress(InvalidPackError):
            assert damaged(packed), position
        flip_byte(packed, position)
    assert damaged(packed) == []


@pytest.mark.parametrize("kept", [0, 7, 50, HEADER_BYTES, 3000, -1])
def test_truncated_file_is_refused_in_one_sentence(kept: int, packed: Path) -> None:
    os.truncate(packed, packed.stat().st_size + kept if kept < 0 else kept)
    with pytest.raises(UsageError) as error:
        open_pack(str(packed), "data.path")
    (problem,) = error.value.problems
    assert has_problem([problem], "damaged" if kept else "unfinished", "data.path", f"{packed} ")
    # The command that packs an unfinished set continues.
    assert (problem.advice == PACK_AGAIN) is (kept != 0)


def test_file_truncated_while_open_names_image(packed: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    pack = Pack(str(packed))
    os.truncate(packed, HEADER_BYTES + 10)
    row = int(np.argmax(pack.offsets))
    with raises_problem("bad-image", "", f"{packed} ", f" image {row} ", kind=UnreadableImageError):
        pack.read(row)


def test_file_replaced_while_open_is_read_to_end(packed: Path) -> None:
    pack = Pack(str(packed))
    content = pack.read(5)
    packed.unlink()
    packed.write_bytes(b"another file")
    assert pack.read(5) == content


def test_unpickled_pack_is_same_file(packed: Path) -> None:
    pack = Pack(str(packed))
    assert len(pickle.dumps(pack)) < 500
    assert pickle.loads(pickle.dumps(pack)).read(5) == pack.read(5)


def test_unpickled_pack_that_was_replaced_is_refused(packed: Path, tmp_path: Path) -> None:
    pickled = pickle.dumps(Pack(str(packed)))
    pack_photos(write_photos(tmp_path / "others", validation=True), packed, force=True)
    with raises_problem("data-changed", kind=InvalidPackError):
        pickle.loads(pickled)


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"PK\x03\x04" * 99, "wrong-format"), (b"", "unfinished")],
)
def test_other_file_is_refused(content: bytes, code: str, tmp_path: Path) -> None:
    (tmp_path / "a.gpk").write_bytes(content)
    with raises_problem(code, "data.path", f"{tmp_path / 'a.gpk'} "):
        open_pack(str(tmp_path / "a.gpk"), "data.path")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with raises_problem("not-readable", "data.path", f"{tmp_path / 'missing.gpk'} ", os.strerror(errno.ENOENT)):
        open_pack(str(tmp_path / "missing.gpk"), "data.path")


def test_folder_is_refused_with_command_that_packs_it(tmp_path: Path) -> None:
    with raises_problem("not-a-file", "data.path", f"{tmp_path} ", f"`gputrain data pack {tmp_path} -o FILE`"):
        open_pack(str(tmp_path), "data.path")


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gpk")
    with raises_problem("not-readable", "data.path", f"{tmp_path / 'a.gpk'} "):
        open_pack(str(tmp_path / "a.gpk"), "data.path")


def write_tables(path: Path, **changes: object) -> Path:
    """Write a packed set of three images of 10 bytes whose checksums are right, with other tables."""
    values: dict[str, object] = {
        "num_train": 3,
        "num_val": 0,
        "offsets": np.array([96, 106, 116], np.uint64),
        "sizes": np.full(3, 10, np.uint32),
        "checksums": np.zeros(3, np.uint32),
        "labels": np.array([0, 0, 1], np.uint32),
        "names": ["a", "b", "c"],
        "info": PackInfo(classes=("x", "y"), encoding=None),
    }
    with path.open("wb") as file:
        write_index(file.fileno(), **values | changes)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": np.array([96, 106, 1 << 63], np.uint64)},
        {"offsets": np.array([0, 106, 116], np.uint64)},
        {"offsets": np.array([96, 106, 117], np.uint64)},
        {"labels": np.array([0, 0, 2], np.uint32)},
        {"names": ["a", "", "c"]},
        {"names": ["a", "b" * 5000, "c"]},
        {"info": {}},
        {"info": {"classes": ["x"]}},
        {"info": {"classes": "xy"}},
        {"info": {"classes": ["x", 3]}},
        {"info": {"classes": ["x", "x"]}},
        {"num_train": 0, "num_val": 3},
        {"num_val": 4},
    ],
)
def test_index_that_misleads_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    assert Pack(str(write_tables(tmp_path / "right.gpk"))).num_images == 3
    with raises_problem("damaged", kind=InvalidPackError):
        Pack(str(write_tables(tmp_path / "wrong.gpk", **changes)))


def test_packed_set_may_have_one_training_image(tmp_path: Path) -> None:
    pack = Pack(str(write_tables(tmp_path / "a.gpk", num_train=1, num_val=2)))
    assert (pack.num_train, pack.num_val) == (1, 2)


def test_verify_refuses_bytes_that_belong_to_no_image(tmp_path: Path) -> None:
    path = write_tables(tmp_path / "gap.gpk", offsets=np.array([96, 96, 116], np.uint64))
    with raises_problem("damaged", kind=InvalidPackError):
        damaged(path)


def test_huge_sparse_file_is_refused_without_reading_it(packed: Path) -> None:
    header = bytearray(packed.read_bytes()[:HEADER_BYTES])
    size = 1 << 40
    header[16:24], header[24:32], header[32:40] = (value.to_bytes(8, "little") for value in (size, 96, 1 << 38))
    packed.write_bytes(header)
    os.truncate(packed, size)
    with raises_problem("damaged", kind=InvalidPackError):
        Pack(str(packed))


def test_names_that_are_no_unicode_are_kept(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    (photos / "cat" / "1.jpg").rename(photos / "cat" / "\udcff\udce9.jpg")
    pack_photos(photos, tmp_path / "a.gpk")
    pack = Pack(str(tmp_path / "a.gpk"))
    assert "cat/\udcff\udce9.jpg" in [*pack.names(0, pack.num_images)]
