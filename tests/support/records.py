"""All records of `engine.base.codec` that gputrain declares, and the parts of their types."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from msgspec import inspect

from engine.base.codec import Record

ROOT = Path(__file__).parents[2]


@cache
def record_classes() -> list[type[Record]]:
    """Return every record class of engine and tui. Some of the modules that it imports import torch."""
    for path in record_modules():
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = {kind for kind in _subclasses(Record) if kind.__module__.startswith(("engine.", "tui."))}
    found -= {kind for kind in found if kind.__module__ == Record.__module__}
    return sorted(found, key=record_name)


def record_modules() -> list[Path]:
    """Return the files that declare a class derived from `Record`, directly or through a class of the same name."""
    declared: dict[Path, list[tuple[str, set[str]]]] = {}
    for package in ("engine", "tui"):
        for path in sorted((ROOT / package).rglob("*.py")):
            classes = re.findall(r"^ *class (\w+)\(([^)]*)\)", path.read_text(), re.MULTILINE)
            declared[path] = [(name, set(re.findall(r"\w+", bases))) for name, bases in classes]
    names, size = {"Record", "FileRecord"}, 0
    while len(names) > size:
        size = len(names)
        names |= {name for classes in declared.values() for name, bases in classes if bases & names}
    return [path for path, classes in declared.items() if any(bases & names for _, bases in classes)]


def _subclasses(kind: type[Record]) -> Iterator[type[Record]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def record_name(kind: type[Record]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def field_types(kind: type[Record]) -> Iterator[tuple[str, inspect.Type]]:
    """Yield the name and the type of each field, and of the parts of each type but for those of other records."""
    [info] = inspect.multi_type_info([kind])
    assert isinstance(info, inspect.StructType)
    for part in info.fields:
        for part_type in _parts(part.type, set()):
            yield part.encode_name, part_type


def _parts(kind: inspect.Type, seen: set[type]) -> Iterator[inspect.Type]:
    yield kind
    match kind:
        case inspect.Metadata(type=inner):
            yield from _parts(inner, seen)
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for inner in types:
                yield from _parts(inner, seen)
        case inspect.CollectionType(item_type=inner):
            yield from _parts(inner, seen)
        case inspect.DictType():
            yield from _parts(kind.key_type, seen)
            yield from _parts(kind.value_type, seen)
        case inspect.StructType(cls=cls, fields=parts) | inspect.DataclassType(cls=cls, fields=parts):
            # A record is checked as a class of its own, but not with the parameters of a generic one.
            if cls not in seen and not (isinstance(cls, type) and issubclass(cls, Record)):
                seen.add(cls)
                for part in parts:
                    yield from _parts(part.type, seen)
        case _:
            return
