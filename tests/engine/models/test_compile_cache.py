"""Compiled code that is kept between runs: its key, whom its files may belong to, their limits, and damage."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from engine.config.loader import resolve_config
from engine.models import compile_cache
from engine.models.compile import COMPILE_FOLDER_VARIABLE, OWN_FOLDER_VARIABLE, CompileCache
from engine.models.compile_cache import (
    CompileCacheError,
    CompiledCode,
    cache_path,
    load_compiled_code,
    read_libraries,
    save_compiled_code,
    write_libraries,
)
from support.messages import has_problem, raises_problem

CPU = torch.device("cpu")
KEY = "0" * 32
CODE = CompiledCode(b"artifacts of torch", {"ab/cabc.main.so": b"\x7fELF" + bytes(1000)})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep the cache below `tmp_path`, and restore the variables of torch's compile folder."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for name in (COMPILE_FOLDER_VARIABLE, OWN_FOLDER_VARIABLE):
        # Set first, so that it is restored after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield folder


def key_of(*overrides: str, **shapes: Any) -> str:
    config = resolve_config("digits", ["model.compile=true", *overrides]).config
    return CompileCache(config, CPU, {"batch_size": 64, **shapes})._key


def loaded_cache(monkeypatch: pytest.MonkeyPatch, artifacts: object = "info") -> CompileCache:
    """Return a cache that has tried to load, with what `load_cache_artifacts` returns."""
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _: artifacts)
    monkeypatch.setattr("engine.models.compile._skip_precompiled_headers", lambda: None)
    # The real one imports torch's compiler, which takes seconds.
    monkeypatch.setattr("engine.models.compile._compiled_graphs", lambda: 0)
    if COMPILE_FOLDER_VARIABLE not in os.environ:
        # As `compile_in_place` does, which imports torch's compiler.
        own = str(cache_path(KEY).parents[3])
        monkeypatch.setenv(COMPILE_FOLDER_VARIABLE, own)
        monkeypatch.setenv(OWN_FOLDER_VARIABLE, own)
    cache = CompileCache(resolve_config("digits", ["model.compile=true"]).config, CPU, {})
    cache._key = KEY
    cache.load()
    return cache


def test_compiled_code_is_loaded_as_saved_with_private_mode() -> None:
    assert load_compiled_code(KEY) is None
    save_compiled_code(KEY, CODE)
    assert load_compiled_code(KEY) == CODE
    assert cache_path(KEY).stat().st_mode & 0o777 == 0o600
    assert cache_path(KEY).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    ["model.name=linear", "model.compile_mode=max-autotune", "precision.amp=bf16", "model.channels_last=off"],
)
def test_key_changes_with_config(change: str) -> None:
    assert key_of(change) != key_of()


def test_key_changes_with_shapes_versions_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of(), key_of(batch_size=32), key_of(world_size=2)}
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.add(key_of())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX1024")
    keys.add(key_of())
    assert len(keys) == 5


def test_key_does_not_depend_on_what_is_not_compiled() -> None:
    assert key_of("optim.lr=0.5", "run.seed=3", "model.ema=0.9", "run.epochs=9") == key_of()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622], ids=oct)
def test_file_that_others_can_read_or_change_is_not_used(mode: int) -> None:
    save_compiled_code(KEY, CODE)
    cache_path(KEY).chmod(mode)
    with raises_problem("foreign-owner" if mode != 0o622 else "foreign-writable", kind=CompileCacheError):
        load_compiled_code(KEY)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change owners")
def test_file_and_folder_of_another_user_are_not_used(cache: Path) -> None:
    save_compiled_code(KEY, CODE)
    for path in (cache_path(KEY), cache_path(KEY).parent, cache / "gputrain"):
        os.chown(path, 12345, -1)
        with raises_problem("foreign-writable", "", f" {path} ", "uid 12345", kind=CompileCacheError):
            load_compiled_code(KEY)
        os.chown(path, os.geteuid(), -1)
    assert load_compiled_code(KEY) == CODE


def test_folder_that_others_can_write_to_is_neither_read_nor_written(cache: Path) -> None:
    save_compiled_code(KEY, CODE)
    (cache / "gputrain").chmod(0o777)
    with raises_problem("foreign-writable", "", f" {cache / 'gputrain'} ", kind=CompileCacheError):
        load_compiled_code(KEY)
    with raises_problem("not-writable", "", f" {cache / 'gputrain'} ", kind=CompileCacheError):
        save_compiled_code("1" * 32, CODE)


def test_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    save_compiled_code(KEY, CODE)
    target = cache_path(KEY).rename(tmp_path / "elsewhere.zip")
    cache_path(KEY).symlink_to(target)
    with raises_problem("not-readable", "", os.strerror(errno.ELOOP), kind=CompileCacheError):
        load_compiled_code(KEY)


def test_any_damage_is_one_error() -> None:
    save_compiled_code(KEY, CODE)
    content = cache_path(KEY).read_bytes()
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 255
        for damaged in (bytes(changed), content[:position]):
            cache_path(KEY).write_bytes(damaged)
            try:
                assert load_compiled_code(KEY) == CODE, "only bytes without a meaning may change"
            except CompileCacheError as error:
                assert error.code == "damaged"


@pytest.mark.parametrize(
    "name", ["libraries/../../escaped.so", "libraries//etc/a.so", "libraries/.hidden/a.so", "libraries/a.py", "code.so"]
)
def test_entry_with_another_name_is_refused(name: str) -> None:
    save_compiled_code(KEY, CODE)
    with ZipFile(cache_path(KEY), "a") as archive:
        archive.writestr(name, b"code")
    with raises_problem("damaged", kind=CompileCacheError):
        load_compiled_code(KEY)


def test_content_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = CompiledCode(bytes(1 << 20), {})
    save_compiled_code(KEY, zeros)
    monkeypatch.setattr(compile_cache, "MAX_FILE_BYTES", 1 << 19)
    with raises_problem("damaged", "", "512 KiB", kind=CompileCacheError):
        load_compiled_code(KEY)
    with raises_problem("too-large", "", "512 KiB", kind=CompileCacheError):
        save_compiled_code(KEY, zeros)


def test_files_that_were_not_used_for_longest_are_deleted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [str(number) * 32 for number in range(4)]
    for age, key in enumerate(keys[:3]):
        save_compiled_code(key, CODE)
        os.utime(cache_path(key), (time.time() - 1000 + age,) * 2)
    assert load_compiled_code(keys[0]) is not None, "this use counts"
    monkeypatch.setattr(compile_cache, "MAX_TOTAL_BYTES", 2 * cache_path(keys[0]).stat().st_size)
    save_compiled_code(keys[3], CODE)
    assert [load_compiled_code(key) is not None for key in keys] == [True, False, False, True]


def test_libraries_are_restored_where_torch_looks_for_them(tmp_path: Path) -> None:
    for name in ("ab/cabc.main.so", "triton/0/HASH/launcher.cpython-311.so", "ab/code.py", "locks/a.lock"):
        (tmp_path / "first" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "first" / name).write_text(name)
    libraries = read_libraries(tmp_path / "first")
    assert sorted(libraries) == ["ab/cabc.main.so", "triton/0/HASH/launcher.cpython-311.so"]
    write_libraries(tmp_path / "second", libraries)
    assert read_libraries(tmp_path / "second") == libraries


def test_run_uses_compile_folder_of_its_key_and_code_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_compiled_code(KEY, CODE)
    cache = loaded_cache(monkeypatch)
    folder = Path(os.environ[COMPILE_FOLDER_VARIABLE])
    assert (cache.loaded, cache.problem, folder.name) == (True, None, KEY)
    assert folder.is_relative_to(tmp_path)
    assert read_libraries(folder) == CODE.libraries


def test_run_compiles_again_with_one_warning_if_the_code_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    save_compiled_code(KEY, CODE)
    cache = loaded_cache(monkeypatch, artifacts=None)
    assert not cache.loaded and cache.problem is not None
    assert has_problem([cache.problem], "damaged", "", f" {cache_path(KEY)} ")


def test_run_keeps_code_only_if_it_compiled_some(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = (b"new artifacts", None)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: saved)
    save_compiled_code(KEY, CODE)
    cache = loaded_cache(monkeypatch)
    cache.save()
    assert load_compiled_code(KEY) == CODE
    monkeypatch.setattr("engine.models.compile._compiled_graphs", lambda: 1)
    cache.save()
    assert load_compiled_code(KEY) == CODE._replace(artifacts=b"new artifacts")


def test_compile_folder_that_the_user_has_set_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILE_FOLDER_VARIABLE, str(tmp_path / "own"))
    save_compiled_code(KEY, CODE)
    cache = loaded_cache(monkeypatch)
    cache.save()
    assert (cache.loaded, os.environ[COMPILE_FOLDER_VARIABLE]) == (False, str(tmp_path / "own"))
    assert load_compiled_code(KEY) == CODE


def test_file_without_artifacts_is_refused() -> None:
    buffer = io.BytesIO()
    with ZipFile(buffer, "w"):
        pass
    save_compiled_code(KEY, CODE)
    cache_path(KEY).write_bytes(buffer.getvalue())
    with raises_problem("damaged", kind=CompileCacheError):
        load_compiled_code(KEY)
