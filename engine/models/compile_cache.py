"""Compiled code that is kept between runs, one file per key in the user's own cache folder.

A file holds what `torch.compiler.save_cache_artifacts` returns, and the libraries (`*.so`) of torch's compile folder,
which that function leaves out: C++ kernels of the CPU, and Triton's launchers. torch unpickles and runs what it loads,
so a file has the trust of code: it is read only if it belongs to this user, if nobody else can read or change it, and
if nobody else can change a folder above it. A run folder, which can be somebody else's, is never searched.

`engine.training.warmup` loads before the first compiled step, on all ranks, and saves after the last one, on rank 0.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from engine.utils.errors import CodedError
from engine.utils.files import (
    cache_folder,
    delete_oldest_files,
    make_user_folder,
    open_regular_file,
    read_bytes,
    replace_file,
    user_path_problem,
)
from engine.utils.units import format_bytes

FOLDER = "compiled"
# Part of the key: a file of another format is not found.
COMPILE_FORMAT = 1
MAX_FILE_BYTES = 1 << 29
MAX_TOTAL_BYTES = 1 << 31
_ARTIFACTS, _LIBRARIES = "artifacts", "libraries/"
# Names of torch and Triton: hashes, and a Python module's suffix for its platform.
_LIBRARY_NAME = re.compile(r"(?:[\w-][\w.-]*/){1,6}[\w-][\w.-]*\.so")


class CompileCacheError(CodedError):
    """A cache file cannot be used or written. The message is a clause about the file."""


class CompiledCode(NamedTuple):
    """Content of a file: torch's artifacts, and libraries by their path in torch's compile folder."""

    artifacts: bytes
    libraries: dict[str, bytes]


def cache_key(parts: dict[str, Any]) -> str:
    """Return the key of the compiled code that depends on `parts`, which JSON or `str` can represent.

    torch compares each graph with the cached one, so a key that is too coarse costs time and never correctness.
    """
    versioned = {"format": COMPILE_FORMAT, **parts}
    return hashlib.sha256(json.dumps(versioned, sort_keys=True, default=str).encode()).hexdigest()[:32]


def cache_path(key: str) -> Path:
    return cache_folder() / FOLDER / f"{key}.zip"


def load_compiled_code(key: str) -> CompiledCode | None:
    """Return the compiled code of a key, None if there is none. Raises CompileCacheError if it must not be used."""
    path = cache_path(key)
    try:
        data = _read_private(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CompileCacheError(error.strerror or str(error), code="not-readable") from error
    code = _unpack(data)
    # The time of the last use: the file that was not used for longest is deleted first.
    with suppress(OSError):
        os.utime(path)
    return code


def _read_private(path: Path) -> bytes:
    """Return the content of a file that only this user can read and change. Raises OSError and CompileCacheError."""
    if problem := user_path_problem(cache_folder(), str(path.relative_to(cache_folder()))):
        raise CompileCacheError(f"is not used: {problem}", code="foreign-writable")
    with open_regular_file(path, MAX_FILE_BYTES) as file:
        status = os.fstat(file.fileno())
        # Not even root's: a file that this program wrote belongs to this user.
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise CompileCacheError("is not used: it must belong to this user and have mode 0600", code="foreign-owner")
        return file.read(MAX_FILE_BYTES)


def _unpack(data: bytes) -> CompiledCode:
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > MAX_FILE_BYTES:
                raise CompileCacheError(
                    f"is damaged: its content exceeds {format_bytes(MAX_FILE_BYTES)}", code="damaged"
                )
            # Each entry has a CRC-32, which `read` checks.
            content = {entry.filename: archive.read(entry) for entry in entries}
    except (BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise CompileCacheError(f"is damaged: {error}", code="damaged") from error
    artifacts = content.pop(_ARTIFACTS, None)
    libraries = {name.removeprefix(_LIBRARIES): library for name, library in content.items()}
    if artifacts is None or not all(map(_LIBRARY_NAME.fullmatch, libraries)):
        raise CompileCacheError("is damaged: it has other entries than gputrain writes", code="damaged")
    return CompiledCode(artifacts, libraries)


def save_compiled_code(key: str, code: CompiledCode) -> None:
    """Replace the file of a key, and delete files that were not used for longest. Raises CompileCacheError."""
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(_ARTIFACTS, code.artifacts)
        for name, library in sorted(code.libraries.items()):
            archive.writestr(_LIBRARIES + name, library)
    data = buffer.getvalue()
    if max(len(data), len(code.artifacts) + sum(map(len, code.libraries.values()))) > MAX_FILE_BYTES:
        raise CompileCacheError(f"is not written: it would exceed {format_bytes(MAX_FILE_BYTES)}", code="too-large")
    try:
        folder = make_user_folder(cache_folder(), FOLDER)
        folder.chmod(0o700)
        _write(folder / f"{key}.zip", data, 0o600)
        delete_oldest_files(folder, "*.zip", MAX_TOTAL_BYTES)
    except OSError as error:
        raise CompileCacheError(f"cannot be written: {error.strerror or error}", code="not-writable") from error


def read_libraries(folder: Path) -> dict[str, bytes]:
    """Return the libraries below torch's compile folder, by their path in it. Raises OSError."""
    libraries: dict[str, bytes] = {}
    remaining_bytes = MAX_FILE_BYTES
    for path in sorted(folder.rglob("*.so")):
        name = str(path.relative_to(folder))
        if _LIBRARY_NAME.fullmatch(name):
            libraries[name] = read_bytes(path, remaining_bytes)
            remaining_bytes -= len(libraries[name])
    return libraries


def write_libraries(folder: Path, libraries: dict[str, bytes]) -> None:
    """Write the libraries that torch's compile folder lacks. Raises OSError."""
    for name, library in libraries.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(path, library, 0o700)


def _write(path: Path, data: bytes, mode: int) -> None:
    def write(file: BinaryIO) -> None:
        os.fchmod(file.fileno(), mode)
        file.write(data)

    replace_file(path, write)
