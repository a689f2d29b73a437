"""The unfinished packed set: when it is flushed, what a full disk costs, and which files it refuses."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.data.pack.pack_file import HEADER_BYTES
from engine.data.pack.partial import SPARE_BYTES, SYNC_SECONDS, PartialPack
from engine.utils.errors import UsageError

OPTIONS = {"format": 1}
STAMPS = [bytes([number] * 8) for number in range(8)]
RECORD_BYTES = 20


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "a.gpk"


@pytest.fixture
def pack(output: Path) -> Iterator[PartialPack]:
    pack = PartialPack(output, OPTIONS, sync_bytes=100)
    pack.begin([])
    yield pack
    pack.close()


def synced_images(output: Path) -> int:
    """Return the number of images that an interruption keeps."""
    return (output.with_name("a.gpk.partial.journal").stat().st_size - 65) // RECORD_BYTES


def test_partial_pack_flushes_records_after_a_number_of_bytes(pack: PartialPack, output: Path) -> None:
    synced = []
    for stamp, size in zip(STAMPS, (99, 1, 99, 1), strict=False):
        pack.append(stamp, bytes(size))
        synced.append(synced_images(output))
    assert synced == [0, 2, 2, 4]


def test_partial_pack_flushes_records_after_a_number_of_seconds(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pack = PartialPack(output, OPTIONS)
    pack.begin([])
    synced = []
    for stamp, after_s in zip(STAMPS, (SYNC_SECONDS, 1.0, SYNC_SECONDS), strict=False):
        now += after_s
        pack.append(stamp, b"1")
        synced.append(synced_images(output))
    pack.close()
    assert synced == [0, 2, 2]


def test_partial_pack_on_full_disk_gives_up_unsynced_images_for_spare_room(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = PartialPack(output, OPTIONS)
    pack.begin([])
    pack.append(STAMPS[0], bytes(100))
    pack.sync()
    for stamp in STAMPS[1:5]:
        pack.append(stamp, bytes(SPARE_BYTES // 2))
    fsync, calls = os.fsync, []

    def fail_once(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_once)
    pack.keep()
    pack.close()
    # Two images are the spare room, and the third one is that of the records.
    assert [record.stamp for record in pack.records] == STAMPS[:2]
    assert synced_images(output) == 2
    assert output.with_name("a.gpk.partial").stat().st_size == HEADER_BYTES + 100 + SPARE_BYTES // 2


@pytest.mark.parametrize("name", ["a.gpk.partial", "a.gpk.partial.journal"])
def test_partial_pack_refuses_pipe_in_place_of_its_files(name: str, output: Path) -> None:
    os.mkfifo(output.with_name(name))
    with pytest.raises(UsageError) as error:
        PartialPack(output, OPTIONS)
    (problem,) = error.value.problems
    assert problem.location == "--output"
    assert str(output.with_name(name)) in problem.reason


def test_refused_partial_pack_releases_its_lock(output: Path) -> None:
    journal = output.with_name("a.gpk.partial.journal")
    journal.mkdir()
    with pytest.raises(OSError, match="directory"):
        PartialPack(output, OPTIONS)
    journal.rmdir()
    PartialPack(output, OPTIONS).close()


def test_partial_pack_forgets_images_of_other_options(pack: PartialPack, output: Path) -> None:
    pack.append(STAMPS[0], bytes(100))
    pack.append(STAMPS[1], bytes(100))
    pack.close()
    other = PartialPack(output, {"format": 2})
    assert other.records == []
    assert "2 images" in str(other.restart)
    other.close()


def test_partial_pack_of_other_options_without_images_gives_no_reason(pack: PartialPack, output: Path) -> None:
    pack.close()
    other = PartialPack(output, {"format": 2})
    assert other.restart is None
    other.close()


def test_partial_pack_keeps_beginning_with_same_stamps(pack: PartialPack, output: Path) -> None:
    for stamp in STAMPS[:4]:
        pack.append(stamp, bytes(100))
    pack.close()
    again = PartialPack(output, OPTIONS)
    assert again.begin([*STAMPS[:2], b"changed!", STAMPS[3]]) == 2
    assert "2 of 4" in str(again.restart)
    assert [record.stamp for record in again.records] == STAMPS[:2]
    assert synced_images(output) == 2
    again.close()
    same = PartialPack(output, OPTIONS)
    assert same.begin(STAMPS) == 2
    assert same.restart is None
    same.close()
