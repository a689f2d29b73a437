"""The codec alone reads JSON, and every record declares bounds and names in snake case."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from msgspec import inspect

from engine.utils.codec import FileRecord, Record
from support.records import ROOT, field_types, record_classes, record_modules, record_name

CODEC = "engine/utils/codec.py"
READERS = {"parse_json", "read_json", "JSONDecoder", "from_json"}
# The functions that read JSON of other programs.
FOREIGN_JSON = {
    "engine/data/sources/tar_index.py:_read_label",  # labels in a tar shard
    "engine/config/differences.py:_json_value",  # values of YAML as JSON, for comparisons
    "engine/foreign/reading.py:parse_json_object",  # rows of other trainers
    "engine/foreign/json_file.py:_rows",
    "engine/foreign/trainer_state.py:",
    "engine/foreign/wandb_log.py:_parse_json",
}


def test_codec_alone_reads_json() -> None:
    found = {place for package in ("engine", "tui") for place in places_that_read_json(package)}
    assert len(FOREIGN_JSON) <= 8
    assert found == FOREIGN_JSON


def places_that_read_json(package: str) -> Iterator[str]:
    """Yield `file:function` for each use of a function that reads JSON. Code in texts does not count."""
    for path in sorted((ROOT / package).rglob("*.py")):
        name, source = str(path.relative_to(ROOT)), path.read_bytes()
        # Parsing all files takes a second.
        if name != CODEC and re.search(rb"json|JSON|msgspec", source):
            for function in functions_that_read_json(ast.parse(source)):
                yield f"{name}:{function}"


def functions_that_read_json(tree: ast.AST, function: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if reads_json(node):
            yield function
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from functions_that_read_json(node, node.name if is_function else function)


def reads_json(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="json"), attr="load" | "loads"):
            return True
        case ast.ImportFrom(module="json" | "msgspec" | "msgspec.json"):
            return True
        case ast.ImportFrom(names=names):
            return any(name.name in READERS and name.asname for name in names)
        case ast.Import(names=names):
            return any(name.name.startswith("msgspec") or (name.name == "json" and name.asname) for name in names)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in READERS
    return False


@pytest.mark.parametrize(
    ("source", "function"),
    [
        ("import json\ndef f():\n    return map(json.loads, [])", "f"),
        ("def f():\n    json.load(file)", "f"),
        ("from json import loads", ""),
        ("import json as j", ""),
        ("decoder = json.JSONDecoder()", ""),
        ("def f():\n    from pydantic_core import from_json as parse", "f"),
        ("import msgspec.json", ""),
    ],
)
def test_check_finds_reader_of_json(source: str, function: str) -> None:
    assert list(functions_that_read_json(ast.parse(source))) == [function]
    assert list(functions_that_read_json(ast.parse(f"text = {source!r}\nimport json\njson.dumps(1)"))) == []


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


def test_few_modules_read_scores_of_ema_weights() -> None:
    """Others read `EpochEvent.ema`, `selection_accuracy` or `selection_loss`."""
    readers = {
        str(path.relative_to(ROOT))
        for package in ("engine", "tui")
        for path in (ROOT / package).rglob("*.py")
        if b"ema_val_" in path.read_bytes()
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("ema_val_")
    }
    assert readers == {"engine/runs/events.py"}
