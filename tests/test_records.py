"""Every record declares bounds and names in snake case. That the codec alone reads JSON is a rule of the linter."""

from __future__ import annotations

import re

from msgspec import inspect

from engine.base.codec import FileRecord, Record
from support.records import ROOT, field_types, record_classes, record_modules, record_name


def test_records_are_declared_in_modules_that_are_found() -> None:
    """A module that renames `Record` when it imports it would escape the walk of the files."""
    declared = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in record_modules()}
    assert {kind.__module__ for kind in record_classes()} <= declared
    assert Record not in record_classes()


def test_numbers_of_records_are_bounded() -> None:
    unbounded = [
        f"{record_name(kind)}.{name}"
        for kind in record_classes()
        for name, part in field_types(kind)
        if isinstance(part, inspect.IntType | inspect.FloatType) and not is_bounded(part)
    ]
    assert unbounded == []


def is_bounded(number: inspect.IntType | inspect.FloatType) -> bool:
    has_lower = number.ge is not None or number.gt is not None
    return has_lower and (number.le is not None or number.lt is not None)


def test_lists_in_files_are_bounded() -> None:
    unbounded = [
        f"{record_name(kind)}.{name}"
        for kind in record_classes()
        if issubclass(kind, FileRecord)
        for name, part in field_types(kind)
        if isinstance(part, inspect.CollectionType | inspect.DictType) and part.max_length is None
    ]
    assert unbounded == []


def test_fields_of_records_are_in_snake_case() -> None:
    names = [f"{record_name(kind)}.{name}" for kind in record_classes() for name, _ in field_types(kind)]
    assert [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_]*", name.rpartition(".")[2])] == []


def test_checks_of_records_find_what_they_forbid() -> None:
    class Loose(FileRecord, frozen=True, kw_only=True):
        number: int
        nested: tuple[float | None, ...]

    parts = [part for _, part in field_types(Loose)]
    assert [part for part in parts if isinstance(part, inspect.IntType) and not is_bounded(part)]
    assert [part for part in parts if isinstance(part, inspect.FloatType) and not is_bounded(part)]
    assert [part for part in parts if isinstance(part, inspect.CollectionType) and part.max_length is None]
