"""Packing a folder: contents, determinism, interruptions and refusals."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.data.pack import partial
from engine.data.pack.pack_file import Pack
from engine.data.pack.reencode import DEFAULT_QUALITY, Encoding, reencode, restart_interval
from engine.data.pack.writer import PackProgress, PackRequest, PackStopped, expected_size, make_plan, write_pack
from engine.utils.errors import Problem, UsageError
from support.data.packed_photos import NUM_PHOTOS, pack_photos, write_photos
from support.gputrain_command import ROOT
from support.messages import has_problem, raises_problem, says

REDUCED = Encoding(max_side=40, quality=DEFAULT_QUALITY)
# Packs with a sync after each image, slowly enough to be killed between two of them.
SLOW_PACK = """
import sys, time
from pathlib import Path
from support.data.packed_photos import pack_photos
from engine.data.pack.reencode import DEFAULT_QUALITY, Encoding
pack_photos(
    Path(sys.argv[1]), Path(sys.argv[2]), Encoding(max_side=40, quality=DEFAULT_QUALITY), sync_bytes=1,
    on_progress=lambda progress: (print(progress.done, flush=True), time.sleep(0.02)),
)
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A packed set with re-encoded images that was never interrupted."""
    output = tmp_path_factory.mktemp("whole") / "photos.gpk"
    pack_photos(photos, output, REDUCED)
    return output.read_bytes()


def stop_after(count: int) -> dict[str, Any]:
    """Return arguments that stop the packing after this many images."""
    done: list[int] = []

    def note(progress: PackProgress) -> None:
        done.append(progress.done)

    return {"on_progress": note, "should_stop": lambda: done[-1] >= count}


def contents(path: Path) -> dict[str, bytes]:
    pack = Pack(str(path))
    return {pack.name(row): pack.read(row) for row in range(pack.num_images)}


def test_pack_without_options_keeps_files_byte_for_byte(photos: Path, tmp_path: Path) -> None:
    summary = pack_photos(photos, tmp_path / "photos.gpk")
    files = {str(path.relative_to(photos)): path.read_bytes() for path in photos.rglob("*.*")}
    assert contents(tmp_path / "photos.gpk") == files
    assert summary.images == {"train": NUM_PHOTOS, "val": 0}
    assert summary.size_bytes == (tmp_path / "photos.gpk").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos.gpk"]


def test_pack_reduces_every_image_to_upright_jpeg_with_restart_markers(
    photos: Path, whole: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.gpk").write_bytes(whole)
    packed = contents(tmp_path / "a.gpk")
    for data in packed.values():
        image = Image.open(io.BytesIO(data))
        assert (image.format, max(image.size), image.getexif().get(0x112, 1)) == ("JPEG", 40, 1)
        assert b"\xff\xdd" in data
        assert data.endswith(b"\xff\xd9")
        assert b"by me" not in data
    rotated = Image.open(io.BytesIO(packed["cat/5.jpg"]))
    assert rotated.width < rotated.height


def test_pack_composites_transparency_on_white() -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(buffer, "PNG")
    assert Image.open(
        io.BytesIO(reencode(buffer.getvalue(), Encoding(max_side=None, quality=DEFAULT_QUALITY)))
    ).getpixel((3, 3)) == (255, 255, 255)


def test_pack_keeps_grayscale() -> None:
    buffer = io.BytesIO()
    Image.new("LA", (16, 16), (80, 255)).save(buffer, "PNG")
    image = Image.open(io.BytesIO(reencode(buffer.getvalue(), Encoding(max_side=None, quality=DEFAULT_QUALITY))))
    assert (image.mode, image.getpixel((3, 3))) == ("L", 80)


@pytest.mark.parametrize(("mcus", "interval"), [(1, 1), (32, 4), (24, 4), (21, 3), (25, 5), (23, 23), (30, 3)])
def test_restart_interval_divides_row_of_mcus(mcus: int, interval: int) -> None:
    assert restart_interval(mcus) == interval


@pytest.mark.parametrize("workers", [1, 3])
def test_pack_is_same_for_any_number_of_workers(workers: int, photos: Path, whole: bytes, tmp_path: Path) -> None:
    pack_photos(photos, tmp_path / "a.gpk", REDUCED, workers=workers)
    assert (tmp_path / "a.gpk").read_bytes() == whole


def test_stopped_pack_continues_to_same_bytes(photos: Path, whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(PackStopped) as stop:
        pack_photos(photos, tmp_path / "a.gpk", REDUCED, **stop_after(9))
    assert (stop.value.done, stop.value.total) == (9, NUM_PHOTOS)
    assert not (tmp_path / "a.gpk").exists()
    assert pack_photos(photos, tmp_path / "a.gpk", REDUCED).kept == 9
    assert (tmp_path / "a.gpk").read_bytes() == whole


def test_stop_after_last_image_finishes_pack(photos: Path, whole: bytes, tmp_path: Path) -> None:
    pack_photos(photos, tmp_path / "a.gpk", REDUCED, **stop_after(NUM_PHOTOS))
    assert (tmp_path / "a.gpk").read_bytes() == whole


@pytest.mark.parametrize("damage", ["torn record", "torn content", "flipped record"])
def test_damaged_tail_of_partial_pack_is_packed_again(damage: str, photos: Path, whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(PackStopped):
        pack_photos(photos, tmp_path / "a.gpk", REDUCED, **stop_after(9))
    journal, data = tmp_path / "a.gpk.partial.journal", tmp_path / "a.gpk.partial"
    if damage == "flipped record":
        changed = bytearray(journal.read_bytes())
        changed[-30] ^= 1
        journal.write_bytes(changed)
    else:
        torn = journal if damage == "torn record" else data
        os.truncate(torn, torn.stat().st_size - 7)
    data.open("ab").write(b"tail")
    kept = pack_photos(photos, tmp_path / "a.gpk", REDUCED).kept
    assert kept == (7 if damage == "flipped record" else 8)
    assert (tmp_path / "a.gpk").read_bytes() == whole


def test_changed_image_is_packed_again_and_said(photos: Path, tmp_path: Path) -> None:
    own = write_photos(tmp_path / "own")
    with pytest.raises(PackStopped):
        pack_photos(own, tmp_path / "a.gpk", **stop_after(20))
    first = next(name for name in contents_of_partial(own, tmp_path))
    os.utime(own / first, (1, 1))
    said: list[Problem] = []
    kept = pack_photos(own, tmp_path / "a.gpk", notify=said.append).kept
    assert kept < 20
    assert has_problem(said, "pack-restarted", f"{tmp_path / 'a.gpk'}.partial", f" {20 - kept} of 20 ")
    pack_photos(own, tmp_path / "b.gpk")
    assert (tmp_path / "a.gpk").read_bytes() == (tmp_path / "b.gpk").read_bytes()


def contents_of_partial(photos: Path, folder: Path) -> list[str]:
    """Return the names of the photos in the partial file, in its order."""
    data = (folder / "a.gpk.partial").read_bytes()
    files = {str(path.relative_to(photos)): data.find(path.read_bytes()) for path in photos.rglob("*.*")}
    return sorted((name for name, position in files.items() if position > 0), key=files.__getitem__)[3:]


def test_other_options_pack_again_and_say_so(photos: Path, whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(PackStopped):
        pack_photos(photos, tmp_path / "a.gpk", **stop_after(9))
    said: list[Problem] = []
    assert pack_photos(photos, tmp_path / "a.gpk", REDUCED, notify=said.append).kept == 0
    assert has_problem(said, "pack-restarted", f"{tmp_path / 'a.gpk'}.partial", " 9 images ")
    assert (tmp_path / "a.gpk").read_bytes() == whole


def kill_and_continue(photos: Path, output: Path, kills: int) -> None:
    """Kill the packing of photos at a random time after the first new image, then finish it."""
    rng = np.random.default_rng(0)
    command = [sys.executable, "-c", SLOW_PACK, str(photos), str(output)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    for _ in range(kills):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
            assert process.stdout is not None
            first = int(process.stdout.readline())
            while int(process.stdout.readline()) <= first:
                pass
            time.sleep(rng.uniform(0, 0.06))
            process.kill()
    assert pack_photos(photos, output, REDUCED).kept > 0


def test_killed_pack_continues_to_same_bytes(photos: Path, whole: bytes, tmp_path: Path) -> None:
    kill_and_continue(photos, tmp_path / "a.gpk", 2)
    assert (tmp_path / "a.gpk").read_bytes() == whole


@pytest.mark.soak
def test_pack_killed_twenty_times_continues_to_same_bytes(tmp_path: Path) -> None:
    many = write_photos(tmp_path / "photos", 200)
    pack_photos(many, tmp_path / "whole.gpk", REDUCED)
    kill_and_continue(many, tmp_path / "a.gpk", 20)
    assert (tmp_path / "a.gpk").read_bytes() == (tmp_path / "whole.gpk").read_bytes()


def test_existing_output_is_replaced_only_with_force(photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.gpk"
    output.write_bytes(b"mine")
    with raises_problem("name-in-use", "--output", f"{output} ", "--force"):
        pack_photos(photos, output)
    assert output.read_bytes() == b"mine"
    pack_photos(photos, output, force=True)
    assert Pack(str(output)).num_images == NUM_PHOTOS


def test_folder_as_output_is_refused_before_packing(photos: Path, tmp_path: Path) -> None:
    for force in (False, True):
        with raises_problem("not-a-file", "--output", f"{tmp_path} ", tmp_path / "photos.gpk"):
            pack_photos(photos, tmp_path, force=force)
    assert list(tmp_path.parent.glob("*.partial*")) == []


def test_second_pack_of_same_output_is_refused(photos: Path, tmp_path: Path) -> None:
    with (tmp_path / "a.gpk.partial").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with raises_problem("already-running", "--output", tmp_path / "a.gpk.partial"):
            pack_photos(photos, tmp_path / "a.gpk")


def test_full_disk_keeps_partial_file(
    photos: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def write(fd: int, data: bytes, offset: int) -> None:
        nonlocal written
        written += len(data)
        if written > 5_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(partial, "write_fully", write)
        with raises_problem("disk-full", "--output", tmp_path / "a.gpk", os.strerror(errno.ENOSPC)):
            pack_photos(photos, tmp_path / "a.gpk", REDUCED, sync_bytes=1)
    assert 0 < pack_photos(photos, tmp_path / "a.gpk", REDUCED).kept < NUM_PHOTOS
    assert (tmp_path / "a.gpk").read_bytes() == whole


def test_full_disk_gives_up_last_images_for_their_records(
    photos: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records have no room either, because they are written after the images."""
    disk_bytes = len(whole) * 3 // 4

    def write(fd: int, data: bytes, offset: int) -> None:
        used = sum(path.stat().st_size for path in tmp_path.iterdir())
        if used + max(offset + len(data) - os.fstat(fd).st_size, 0) > disk_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(partial, "write_fully", write)
        patch.setattr(partial, "SPARE_BYTES", 0)
        with raises_problem("disk-full", "--output", os.strerror(errno.ENOSPC)):
            pack_photos(photos, tmp_path / "a.gpk", REDUCED)
    assert pack_photos(photos, tmp_path / "a.gpk", REDUCED).kept > NUM_PHOTOS // 2
    assert (tmp_path / "a.gpk").read_bytes() == whole


@pytest.mark.parametrize("name", ["missing/a.gpk", "file/a.gpk"])
def test_missing_output_folder_is_refused_before_the_scan(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with raises_problem("not-found", "--output", f" {(tmp_path / name).parent}"):
        pack_photos(tmp_path / "unscanned", tmp_path / name)


def test_read_only_output_folder_is_refused_before_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write to any folder but those of a read-only file system.
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == tmp_path and mode & os.W_OK))
    with raises_problem("not-writable", "--output", f" {tmp_path}"):
        pack_photos(tmp_path / "unscanned", tmp_path / "a.gpk")


def test_limit_of_file_size_is_named(photos: Path, whole: bytes, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        with raises_problem("too-large", "--output", os.strerror(errno.EFBIG), "(ulimit -f)"):
            pack_photos(photos, tmp_path / "a.gpk", REDUCED, sync_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < pack_photos(photos, tmp_path / "a.gpk", REDUCED).kept < NUM_PHOTOS
    assert (tmp_path / "a.gpk").read_bytes() == whole


def test_link_in_place_of_partial_file_is_not_followed(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"mine")
    (tmp_path / "a.gpk.partial").symlink_to(tmp_path / "other")
    with raises_problem("is-link", "--output", f"{tmp_path / 'a.gpk.partial'} "):
        pack_photos(photos, tmp_path / "a.gpk")
    assert (tmp_path / "other").read_bytes() == b"mine"


def test_unreadable_file_is_skipped_and_named(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    (photos / "cat" / "notes.txt").write_text("no image")
    summary = pack_photos(photos, tmp_path / "a.gpk")
    [skipped] = summary.skipped
    assert says(skipped, "bad-image", "cat/notes.txt (")
    assert "cat/notes.txt" not in contents(tmp_path / "a.gpk")


def test_empty_class_is_packed_only_if_allowed(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    (photos / "fox").mkdir()
    with raises_problem("empty-class", "FOLDER", f" {photos / 'fox'} ", "--allow-empty"):
        pack_photos(photos, tmp_path / "a.gpk")
    pack_photos(photos, tmp_path / "a.gpk", allow_empty=True)
    assert Pack(str(tmp_path / "a.gpk")).classes == ("cat", "dog", "fox")


def test_expected_size_is_that_of_pack(photos: Path, whole: bytes, tmp_path: Path) -> None:
    size = expected_size(make_plan(PackRequest(photos, tmp_path / "a.gpk", REDUCED)))
    assert abs(size - len(whole)) < 200


@pytest.mark.parametrize("encoding", [None, REDUCED])
def test_image_that_changes_while_it_is_packed_is_refused(encoding: Encoding | None, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    plan = make_plan(PackRequest(photos, tmp_path / "a.gpk", encoding))
    changed = photos / plan.names[5]
    os.utime(changed, (1, 1))
    with pytest.raises(UsageError) as error:
        write_pack(plan, lambda _: None, lambda _: None)
    assert [problem.location for problem in error.value.problems] == [str(changed)]


def test_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    plan = make_plan(PackRequest(photos, tmp_path / "a.gpk", REDUCED))
    damaged = photos / plan.names[5]
    status = damaged.stat()
    damaged.write_bytes(bytes(status.st_size))
    os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UsageError) as error:
        write_pack(plan, lambda _: None, lambda _: None)
    (problem,) = error.value.problems
    assert (problem.location, str(damaged) in problem.reason) == ("FOLDER", True)
