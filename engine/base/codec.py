"""The codec: everything that gputrain writes and reads back as JSON is a declared record.

A record declares its fields with types and bounds, as msgspec defines them. Readers ignore unknown fields. In a file,
null is a value that is not finite, and an absent field is unknown. In Python these are `float | None` and
`T | UnsetType`, or a default. The content of a file is a `FileRecord`, which has a `format`.

`engine.base.files` reads and replaces files.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, field, to_builtins
from msgspec.structs import asdict, fields, replace

from engine.base.errors import CodedError, UsageError, file_errors
from engine.base.files import (
    locked_folder,
    make_user_folder,
    overwrite_bytes,
    read_bytes,
    replace_file,
    user_path_problem,
)

__all__ = ["UNSET", "Meta", "UnsetType", "asdict", "field", "fields", "replace", "to_builtins"]

FORMAT = 1
# How `write_record` begins each file. For others, a second parser checks the format, 2 us of the 55 us of a listed run.
_BEGINNING = f'{{\n  "format": {FORMAT},'.encode()
# Python objects take up to 30 times the memory of their JSON text.
MAX_JSON_BYTES = 1 << 24

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""A number of things. Larger integers are not exact in the floats of other readers."""
Integer = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A float that training computes. One that may be NaN or infinite is `Finite | None`, see `finite`."""
Number = Annotated[float, Meta(ge=-(2.0**63), le=2.0**63)]
"""A measured value. Larger ones can only come from a damaged file, and would overflow later computations."""
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Side = Annotated[int, Meta(ge=1, le=1 << 14)]
"""Pixels of the input of a model, or the number of its channels. A larger one does not fit into memory."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
UnixTime = Annotated[float, Meta(ge=0, lt=2.0**37)]
"""A time in Unix seconds that every calendar function takes."""
FileNumber = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""An inode or device number, as `file_number` returns it."""

ENTRIES = Meta(max_length=1 << 24)
"""Bound of a list or dict whose length only the data decides. The size of its file bounds the memory."""

_ESCAPED_SURROGATE = re.compile(rb"\\udc[89a-f]")
# JSON has such characters only in strings, where any character may be escaped.
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")

T = TypeVar("T")


class Record(Struct, frozen=True, kw_only=True):
    """Base class of what is encoded as a JSON object. A subclass repeats `kw_only=True`, which is not inherited."""


class FileRecord(Record, frozen=True, kw_only=True, tag_field="format", tag=FORMAT):
    """Base class of the content of a file. Its `format` is that of `FORMAT`; files of other formats are refused."""


class InvalidRecordError(CodedError, ValueError):
    """Data is no valid record. The message is a clause that follows the name of the file, with the place in it."""

    code = "damaged"


class Header(Record, frozen=True, kw_only=True):
    """The format of a record that may be of any version."""

    format: Any = None


def define_record(
    name: str, declared: Mapping[str, tuple[Any, Any]], bases: tuple[type[Record], ...], tag: str | None = None
) -> Any:
    """Return a class of records with the fields of `bases`, and further ones: their types and defaults by name."""
    own = [(key, *parts) for key, parts in declared.items()]
    return msgspec.defstruct(name, own, bases=bases, module=bases[0].__module__, frozen=True, kw_only=True, tag=tag)


def finite(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def or_none(value: T | UnsetType) -> T | None:
    """Return None for a value that is unknown."""
    return None if value is UNSET else value


def encode(record: object) -> bytes:
    """Return a record, or a list or dict of records, as one line of printable ASCII JSON without a newline."""
    try:
        data = msgspec.json.encode(record, enc_hook=_plain)
    except UnicodeEncodeError:
        # Takes 1 ms, and few programs need it.
        import json

        # A path that is not UTF-8 has surrogates (PEP 383), which msgspec refuses and `json` escapes.
        return json.dumps(_finite_values(to_builtins(record, enc_hook=_plain)), separators=(",", ":")).encode()
    if data.isascii() and b"\x7f" not in data:
        return data
    # Terminals act on characters such as U+009B and U+202E, and people print these lines.
    return _UNPRINTABLE.sub(_escaped, data.decode()).encode()


def encode_indented(record: object) -> bytes:
    """Return a record as JSON for people who read it."""
    data = encode(record)
    try:
        return msgspec.json.format(data, indent=2)
    except msgspec.DecodeError:
        # msgspec refuses escaped surrogates here, too.
        return data


def _finite_values(value: Any) -> Any:
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: _finite_values(part) for key, part in value.items()}
    return [_finite_values(part) for part in value] if isinstance(value, list | tuple) else value


def _plain(value: object) -> str | int | float:
    """Return the plain value of a subclass, such as `torch.__version__` or a NumPy float."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"{type(value).__name__} is no value of a record")


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be").hex(" ", 2).split()
    return "".join(f"\\u{unit}" for unit in units)


@cache
def parser(kind: type[T]) -> Callable[[bytes | str], T]:
    """Return a function that decodes many records of one kind. It raises ValueError and RecursionError.

    It is built when it is first needed: those of all kinds of events take 10 ms."""
    return msgspec.json.Decoder(kind).decode


def decode(data: bytes | str, kind: type[T]) -> T:
    """Return the record that `data` encodes. Raises InvalidRecordError."""
    try:
        if isinstance(kind, type) and issubclass(kind, FileRecord) and data[: len(_BEGINNING)] != _BEGINNING:
            _check_format(data)
        return _parse(data, kind)
    except (ValueError, RecursionError) as error:
        raise _invalid(error) from error


def convert(values: object, kind: type[T]) -> T:
    """Return the record of JSON values that were parsed already, such as an answer of a helper process.

    Raises InvalidRecordError. The format is not checked: messages have none.
    """
    try:
        return msgspec.convert(values, kind)
    except (ValueError, RecursionError) as error:
        raise _invalid(error) from error


def _parse(data: bytes | str, kind: type[T]) -> T:
    """Raises ValueError and RecursionError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except ValidationError:
        raise
    except msgspec.DecodeError:
        if not _ESCAPED_SURROGATE.search(data if isinstance(data, bytes) else data.encode(errors="replace")):
            raise
        import json

        # `int` raises ValueError for NaN and Infinity.
        values = json.loads(data, parse_constant=int)
        # Raises ValueError for surrogates that no path has (PEP 383), which could not be read back.
        json.dumps(values, ensure_ascii=False).encode(errors="surrogateescape")
        return msgspec.convert(values, kind)


def _check_format(data: bytes | str) -> None:
    if (problem := format_problem(_parse(data, Header).format)) is not None:
        raise InvalidRecordError(problem, code="wrong-version")


def format_problem(found: object, known: int = FORMAT) -> str | None:
    """Return why a file of format `found` cannot be read, as a clause that follows its name; None if it can."""
    is_number = isinstance(found, int) and not isinstance(found, bool)
    if is_number and found == known:
        return None
    return f"has {f'format {found}' if is_number else 'no format'}, but this gputrain reads format {known}"


def _invalid(error: Exception) -> InvalidRecordError:
    if isinstance(error, InvalidRecordError):
        return error
    if isinstance(error, ValidationError):
        # msgspec: "Expected `int`, got `str` - at `$.ranks[0].pid`".
        reason, _, place = str(error).replace("`", "").partition(" - at ")
        return InvalidRecordError(f"is damaged: {place or '$'}: {reason[:1].lower()}{reason[1:]}")
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else "it is not valid JSON"
    return InvalidRecordError(f"is damaged: {reason}")


def read_record(path: Path | str, kind: type[T], max_bytes: int = MAX_JSON_BYTES) -> T:
    """Return the record in a regular file of at most `max_bytes`. Raises OSError and InvalidRecordError."""
    return decode(read_bytes(path, max_bytes), kind)


def find_record(path: Path, kind: type[T], max_bytes: int = MAX_JSON_BYTES) -> T | None:
    """Return the record in a file; None if it is missing, unreadable, too large or not valid."""
    try:
        return read_record(path, kind, max_bytes)
    except (OSError, InvalidRecordError):
        return None


def find_user_record(root: Path, name: str, kind: type[T], max_bytes: int = MAX_JSON_BYTES) -> T | None:
    """Return the record in a file of a user folder; None as for `find_record`, or if other users can change it."""
    return find_record(root / name, kind, max_bytes) if user_path_problem(root, name) is None else None


def write_record(path: Path, record: FileRecord, *, durable: bool = False, private: bool = False) -> None:
    """Replace `path` by an indented record, as `replace_file` does. Raises OSError."""
    replace_file(path, lambda file: file.write(encode_indented(record) + b"\n"), durable=durable, private=private)


def change_record(path: Path, location: str, default: T, change: Callable[[T], T], max_bytes: int) -> T:
    """Change the record in a file under the lock of its folder, or the default without one, and return the new record.
    Fields that its class lacks are kept.

    Raises UsageError at `location` if the file is not valid or cannot be written."""
    try:
        with (
            file_errors(location, f"{path.name} cannot be written", code="not-writable"),
            locked_folder(path.parent),
        ):
            stored = read_record(path, dict[str, Any], max_bytes) if os.path.lexists(path) else None
            record = change(default if stored is None else read_record(path, type(default), max_bytes))
            values = (stored or {}) | to_builtins(record)
            replace_file(path, lambda file: file.write(encode_indented(values) + b"\n"))
            return record
    except InvalidRecordError as error:
        advice = f"use the gputrain that wrote it, or delete {path}"
        raise UsageError.one(location, f"{path.name} {error}", advice, code=error.code) from error


def write_user_record(root: Path, name: str, record: FileRecord) -> None:
    """Replace a file in a user folder by a record. Raises OSError as `make_user_folder` does."""
    write_record(make_user_folder(root) / name, record)


def overwrite_record(path: Path, record: FileRecord) -> None:
    """Overwrite an existing file by a record in place, as `overwrite_bytes` does. Raises OSError."""
    overwrite_bytes(path, encode(record) + b"\n")
