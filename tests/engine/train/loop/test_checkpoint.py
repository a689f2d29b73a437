"""Checkpoint files: rotation, detection of damage, and fallback to an older checkpoint."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.base.errors import UsageError
from engine.runs.checkpoint_files import (
    CHECKPOINT_KEYS,
    CHECKSUM_PREFIX,
    COMMENT_BYTES,
    DamagedCheckpointError,
)
from engine.train.loop import checkpoint
from engine.train.loop.checkpoint import load_checkpoint, load_newest, save_checkpoint
from engine.train.loop.device import rng_state, set_rng_state
from support.messages import raises_problem

CPU = torch.device("cpu")
bounded = settings(
    max_examples=60, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(folder: Path, step: int, *, best: bool = False, keep: int = 3, **more: Any) -> Path:
    state = dict.fromkeys(CHECKPOINT_KEYS) | {"step": step, "model": {"w": torch.arange(1000.0) + step}}
    state |= {"epoch": step + 1, "step_in_epoch": 0, "best_epoch": step if best else 0} | more
    return save_checkpoint(state, folder, best=best, keep=keep)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_save_checkpoint_keeps_newest_and_best(tmp_path: Path) -> None:
    for step in (9, 10, 99, 100, 101):
        save(tmp_path, step, best=step == 10, keep=2)
    assert names(tmp_path) == ["best.pt", "last.pt", "step-00000100.pt", "step-00000101.pt"]
    assert load_checkpoint(tmp_path / "best.pt")["step"] == 10
    assert (tmp_path / "last.pt").samefile(tmp_path / "step-00000101.pt")


def test_checkpoint_loads_with_plain_torch_load(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert torch.load(path, weights_only=True)["model"]["w"][3] == 10.0
    assert torch.load(path, weights_only=True, mmap=True)["step"] == 7


def test_save_checkpoint_failure_keeps_previous_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, keep=1)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["last.pt", "step-00000001.pt"]
    assert load_newest(tmp_path)[1]["step"] == 1


def test_save_checkpoint_copies_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.link", lambda *_, **__: (_ for _ in ()).throw(OSError("no links here")))
    damage(save(tmp_path, 5, best=True))
    path, state, damaged = load_newest(tmp_path)
    assert (path, state["step"]) == (tmp_path / "last.pt", 5), "the copy is intact"
    assert len(damaged) == 1


def test_load_checkpoint_rejects_truncated_file(tmp_path: Path) -> None:
    content = save(tmp_path, 1).read_bytes()
    rng = random.Random(0)  # noqa: S311
    for length in (0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(50))):
        (tmp_path / "cut.pt").write_bytes(content[:length])
        with pytest.raises(DamagedCheckpointError):
            load_checkpoint(tmp_path / "cut.pt")


def test_load_checkpoint_rejects_any_flipped_byte(tmp_path: Path) -> None:
    content = save(tmp_path, 1).read_bytes()
    rng = random.Random(0)  # noqa: S311
    positions = [0, *range(len(content) - 100, len(content)), *(rng.randrange(len(content)) for _ in range(50))]
    for position in positions:
        changed = bytearray(content)
        changed[position] ^= rng.randrange(1, 256)
        (tmp_path / "changed.pt").write_bytes(changed)
        with pytest.raises(DamagedCheckpointError):
            load_checkpoint(tmp_path / "changed.pt")


@bounded
@given(st.dictionaries(st.sampled_from([*CHECKPOINT_KEYS, "format"]), st.none() | st.integers() | st.text()))
def test_load_checkpoint_rejects_valid_checksum_with_wrong_content(tmp_path: Path, values: dict[str, Any]) -> None:
    path = save_checkpoint(values | {"step": 1}, tmp_path, best=False, keep=1)
    with suppress(DamagedCheckpointError, UsageError):
        assert load_checkpoint(path).keys() >= CHECKPOINT_KEYS


def test_load_checkpoint_maps_the_file_privately(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model={"w": torch.zeros(1 << 16)})
    content = path.read_bytes()
    weights = load_checkpoint(path)["model"]["w"]
    assert str(path) in Path("/proc/self/maps").read_text()
    weights += 1
    assert path.read_bytes() == content, "writing to a tensor does not change the file"
    save(tmp_path, 1, model={"w": torch.ones(1 << 16)}, config={"other": "content"})
    shutil.rmtree(tmp_path)
    assert weights.sum() == 1 << 16, "the tensor outlives the file, which was replaced and deleted"


def write_compressed_copy(source: Path, target: Path) -> None:
    """Copy a checkpoint with compressed records and a valid checksum."""
    with ZipFile(source) as archive, ZipFile(target, "w", ZIP_DEFLATED) as copy:
        for name in archive.namelist():
            copy.writestr(name, archive.read(name))
    content = bytearray(target.read_bytes())
    content[-2:] = struct.pack("<H", COMMENT_BYTES)
    target.write_bytes(content + CHECKSUM_PREFIX + hashlib.sha256(content).hexdigest().encode())


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths passed to `load_mapped`, which is replaced and reads nothing."""
    files: list[str] = []
    monkeypatch.setattr(checkpoint, "load_mapped", files.append)
    return files


def test_load_checkpoint_rejects_compressed_records(tmp_path: Path, loaded: list[str]) -> None:
    path = save(tmp_path, 1, model={"w": torch.zeros(1 << 20)})
    write_compressed_copy(path, tmp_path / "small.pt")
    assert (tmp_path / "small.pt").stat().st_size < 100_000
    with raises_problem("damaged", kind=DamagedCheckpointError):
        load_checkpoint(tmp_path / "small.pt")
    assert loaded == []


def test_load_checkpoint_reads_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> NoReturn:
        raise RuntimeError("unable to mmap 262144 bytes from file: No such device (19)")

    path = save(tmp_path, 1, model={"w": torch.ones(1 << 16)})
    monkeypatch.setattr(torch.UntypedStorage, "from_file", fails)
    assert load_checkpoint(path)["model"]["w"].sum() == 1 << 16


def test_load_checkpoint_does_not_read_through_link_or_large_sparse_file(
    tmp_path: Path, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[bool] = []

    def record_hash() -> NoReturn:
        hashed.append(True)
        raise OSError

    path = save(tmp_path, 1)
    (tmp_path / "link.pt").symlink_to(path)
    with raises_problem("not-readable", str(tmp_path / "link.pt")):
        load_checkpoint(tmp_path / "link.pt")
    with (tmp_path / "sparse.pt").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(hashlib, "sha256", record_hash)
    with raises_problem("damaged", kind=DamagedCheckpointError):
        load_checkpoint(tmp_path / "sparse.pt")
    assert (hashed, loaded) == ([], [])


def test_load_newest_renames_and_skips_damaged_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(save(tmp_path, 3))
    path, state, damaged = load_newest(tmp_path)
    assert (path, state["step"]) == (tmp_path / "step-00000002.pt", 2)
    assert len(damaged) == 1 and damaged[0].startswith("step-00000003.pt ")
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["last.pt", "step-00000002.pt", "step-00000003.pt.damaged", "step-00000004.pt"]


def test_load_newest_rejects_only_damaged_files_and_accepts_empty_folder(tmp_path: Path) -> None:
    assert load_newest(tmp_path) == (None, {}, [])
    damage(save(tmp_path, 1))
    with raises_problem("damaged", str(tmp_path), "step-00000001.pt"):
        load_newest(tmp_path)


def test_load_newest_does_not_treat_io_error_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    before = names(tmp_path)

    def stale(*_: object, **__: object) -> None:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("engine.train.loop.checkpoint.open_regular_file", stale)
        with raises_problem("not-readable", None, "Stale file handle"):
            load_newest(tmp_path)
    assert names(tmp_path) == before
    assert load_newest(tmp_path)[1]["step"] == 1


def test_killed_save_leaves_no_newer_checkpoint_than_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, best=True)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("engine.train.loop.checkpoint.link_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        save(tmp_path, 2, best=True)
    assert load_newest(tmp_path)[1]["step"] == 1
    assert load_checkpoint(tmp_path / "best.pt")["step"] == 2
    save(tmp_path, 2, best=True)
    assert load_newest(tmp_path)[1]["step"] == load_checkpoint(tmp_path / "best.pt")["step"] == 2


@pytest.mark.parametrize(
    ("found", "shown"), [(3, "format 3"), (0, "format 0"), (True, "no format"), ("1", "no format")]
)
def test_checkpoint_of_another_format_is_refused(tmp_path: Path, found: object, shown: str) -> None:
    path = save(tmp_path, 1, format=found, config={})
    for read in (lambda: load_checkpoint(path), lambda: load_newest(tmp_path)):
        with raises_problem("wrong-version", str(path), shown, "reads format 1"):
            read()
    assert path.exists(), "it is not damaged"


class Attack:
    """Runs a shell command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_load_checkpoint_does_not_execute_pickled_code(tmp_path: Path) -> None:
    path = save(tmp_path, 1, code=Attack(f"touch {tmp_path}/attacked"))
    with raises_problem("damaged", kind=DamagedCheckpointError):
        load_checkpoint(path)
    assert not (tmp_path / "attacked").exists()


def test_rng_state_restores_every_generator() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(1).item()  # noqa: S311

    random.gauss()
    np.random.standard_normal()
    state = rng_state(CPU)
    first = draw()
    assert draw() != first
    set_rng_state(state, CPU)
    assert draw() == first
