"""What `gputrain clean` finds and removes: caches without locks that are held, and reservations of dead runs."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from engine.gpus.reservation import Reservation
from engine.jobs.doctor.leftovers import find_leftovers, remove_leftovers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reservations").mkdir()
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path / "reservations"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "gputrain"
    (folder / "decoded").mkdir(parents=True)
    return folder


def test_caches_are_counted_by_folder_or_beginning_and_removed(cache: Path) -> None:
    for name in ("images-1.json", "images-2.json", "decoded/1.npy", "decoded/1.lock"):
        (cache / name).write_bytes(b"12345")
    found = {Path(row.place).name: (row.files, row.size_bytes) for row in find_leftovers()}
    assert found == {"decoded": (2, 10), "images*": (2, 10)}
    remove_leftovers()
    assert find_leftovers() == [] and not cache.exists()


def test_lock_that_a_process_holds_stays(cache: Path) -> None:
    with (cache / "decoded" / "1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_leftovers() == []
        remove_leftovers()
        assert [path.name for path in (cache / "decoded").iterdir()] == ["1.lock"]


def test_reservation_of_a_dead_run_goes_and_that_of_a_live_one_stays(cache: Path) -> None:
    live = Reservation()
    live.reserve(["GPU-1"], "all", ["GPU-1"], "live")
    [folder] = (cache.parent / "reservations").glob("gputrain-*")
    (folder / "1-2.lock").touch(0o644)
    (folder / "1-2.json").write_text("{}")
    assert [(row.place, row.files) for row in find_leftovers()] == [(f"{folder} (dead runs)", 2)]
    remove_leftovers()
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".lock"]
    live.release()
