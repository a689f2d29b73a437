"""Tar shards of an image folder: what they contain, and that training on them equals training on the folder."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from engine.config.loader import resolve_config
from engine.train.data import pack as writer
from engine.train.data.pack import DEFAULT_QUALITY, Encoding, PackRequest, reencode, scan_for_pack
from engine.train.data.sources.base import EncodedSource
from engine.train.data.sources.open import open_source
from support.data.packed_photos import NUM_PHOTOS, pack_photos, write_photos
from support.messages import raises_problem

REDUCED = Encoding(max_side=40, quality=DEFAULT_QUALITY)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos")


def open_data(path: Path) -> EncodedSource:
    source = open_source(resolve_config(None, [f"data.path={path}", "data.image_size=16"]).config)
    assert isinstance(source, EncodedSource)
    return source


def images(folder: Path) -> list[bytes]:
    """Return the content of each image of the shards in a folder, in order."""
    found: list[bytes] = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            members = [member for member in archive if not member.name.endswith(".cls")]
            found += [file.read() for member in members if (file := archive.extractfile(member)) is not None]
    return found


@pytest.mark.parametrize("validation", [False, True])
def test_shards_have_the_images_of_the_folder_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validation: bool
) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 20_000)
    photos = write_photos(tmp_path / "photos", validation=validation)
    # A name whose first dot is not the last, one of another image but for its ending, and an unknown ending.
    for name in ("5.2.jpg", "5.png", "5.picture"):
        shutil.copy(next(photos.rglob("5.jpg")), next(photos.rglob("5.jpg")).with_name(name))
    summary = pack_photos(photos, tmp_path / "shards")
    folder, shards = open_data(photos), open_data(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("train-*.tar"))) > 1
    assert summary.images["train"] + summary.images["val"] == NUM_PHOTOS + 3
    assert shards.classes == folder.classes
    for part in ("train", "val"):
        assert shards.get_labels(part).tolist() == folder.get_labels(part).tolist()
        for index in range(folder.num_images(part)):
            assert shards.read_encoded(part, index) == folder.read_encoded(part, index)


def test_shards_are_the_same_for_any_number_of_threads(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads, name in ((1, "first"), (3, "second")):
        monkeypatch.setattr(writer, "available_cores", lambda threads=threads: threads)
        pack_photos(photos, tmp_path / name, REDUCED)
    first, second = ((tmp_path / name / "train-00000.tar").read_bytes() for name in ("first", "second"))
    assert first == second


def test_images_are_reduced_to_upright_jpeg(photos: Path, tmp_path: Path) -> None:
    pack_photos(photos, tmp_path / "shards", REDUCED)
    found = images(tmp_path / "shards")
    assert len(found) == NUM_PHOTOS
    for data in found:
        image = Image.open(io.BytesIO(data))
        assert (image.format, max(image.size), image.getexif().get(0x112, 1)) == ("JPEG", 40, 1)
        assert b"by me" not in data


def test_reencode_composites_transparency_on_white_and_keeps_grayscale() -> None:
    encoding = Encoding(max_side=None, quality=DEFAULT_QUALITY)
    for mode, color, expected in (("RGBA", (255, 0, 0, 0), ("RGB", (255, 255, 255))), ("LA", (80, 255), ("L", 80))):
        Image.new(mode, (16, 16), color).save(buffer := io.BytesIO(), "PNG")
        image = Image.open(io.BytesIO(reencode(buffer.getvalue(), encoding)))
        assert (image.mode, image.getpixel((3, 3))) == expected


def test_existing_output_is_refused(photos: Path, tmp_path: Path) -> None:
    pack_photos(photos, tmp_path / "shards")
    with raises_problem("name-in-use", "--output", str(tmp_path / "shards")):
        pack_photos(photos, tmp_path / "shards")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["shards"]


def test_output_that_cannot_be_written_is_refused_before_the_scan(photos: Path, tmp_path: Path) -> None:
    with raises_problem("not-writable", "--output", str(tmp_path / "none")):
        scan_for_pack(PackRequest(photos, tmp_path / "none" / "shards"))


def test_full_disk_leaves_nothing_under_the_name(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", fail)
    with raises_problem("disk-full", "--output", "No space left"):
        pack_photos(photos, tmp_path / "shards")
    assert not (tmp_path / "shards").exists() and not list(tmp_path.glob(".*"))


def test_unreadable_and_undecodable_images_are_named(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    (photos / "cat" / "text.jpg").write_text("no image")
    assert pack_photos(photos, tmp_path / "shards").skipped[0].startswith("cat/text.jpg (")
    request = PackRequest(photos, tmp_path / "other", REDUCED)
    scan = scan_for_pack(request)
    (photos / "cat" / "0.png").write_bytes(b"no image now")
    with raises_problem("bad-image", "FOLDER", str(photos / "cat" / "0.png")):
        writer.write_shards(request, scan)


def test_class_that_a_line_cannot_name_is_refused(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    (photos / "cat").rename(photos / "cat\ndog")
    with raises_problem("invalid-name", "FOLDER"):
        pack_photos(photos, tmp_path / "shards")
