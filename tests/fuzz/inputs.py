"""Inputs for readers of foreign files: changed and damaged documents, arbitrary bytes, and files that need memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from hypothesis import strategies as st

ODD_VALUES = [
    *(None, True, False, 0, -1, 1, 2, 10, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), "", "0", "nan", "1e999", "\x1b[2J\r\n", "\ud800", "x" * 5000),
    *([], {}, [[]], [{}], [None], [0] * 300, {"": None}, [[[[[[[[]]]]]]]], ["a", 1, None]),
]
VALUES = st.recursive(
    st.one_of(st.sampled_from(ODD_VALUES), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
RAW_BYTES = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([b"null", b"[]", b"{}", b"\xff\xfe{}", b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5000, b"1e999"]),
)


def changed(documents: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Draw one of the documents with up to three values replaced, deleted, added, wrapped or repeated."""

    @st.composite
    def draw_changed(draw: st.DrawFn) -> Any:
        document = copy.deepcopy(draw(st.sampled_from(documents)))
        for _ in range(draw(st.integers(1, 3))):
            document = _change(document, draw)
        return document

    return draw_changed()


def _change(document: Any, draw: st.DrawFn) -> Any:
    places = [(parent, key) for _, parent, key in _fields(document)]
    if not places:
        return copy.deepcopy(draw(VALUES))
    parent, key = draw(st.sampled_from(places))
    action = draw(st.sampled_from(["replace", "replace", "replace", "delete", "wrap", "repeat", "add"]))
    if action == "delete":
        del parent[key]
    elif action == "add" and isinstance(parent, dict):
        parent[draw(st.text(max_size=4))] = copy.deepcopy(draw(VALUES))
    elif action == "repeat":
        parent[key] = [copy.deepcopy(parent[key]) for _ in range(draw(st.integers(0, 40)))]
    else:
        # A copy, because later changes must not change the strategy's own values.
        parent[key] = [parent[key]] if action == "wrap" else copy.deepcopy(draw(VALUES))
    return document


def _fields(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield each container inside a value with each of its keys or indices, after its path, where [] is any index."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(items):
        place = (*path, str(key) if isinstance(value, dict) else "[]")
        yield place, value, key
        yield from _fields(part, place)


def odd_documents(document: Any) -> Iterator[Any]:
    """Yield the document without each of its values, and with each odd value in its place. Changes it in between.

    Of the items of a list, which have one type, the first that has a field stands for all.
    """
    first_places = {path: (parent, key) for path, parent, key in reversed(list(_fields(document)))}
    for parent, key in first_places.values():
        value = parent[key]
        for odd in ODD_VALUES:
            parent[key] = odd
            yield document
        if isinstance(parent, dict):
            del parent[key]
            yield document
        parent[key] = value


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw the content with bytes changed, cut off or moved."""
    data = bytearray(content)
    for position, value in draw(st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(0, 255)), max_size=4)):
        if data:
            data[position % len(data)] = value
    start = draw(st.integers(0, len(data)))
    return bytes(data[draw(st.integers(0, start)) :] + data[:start])


def json_files(documents: Sequence[Any]) -> st.SearchStrategy[bytes]:
    texts = [json.dumps(document).encode() for document in documents]
    return st.one_of(
        changed(documents).map(lambda document: json.dumps(document).encode()),
        changed(documents).map(lambda document: json.dumps(document).encode()),
        st.sampled_from(texts).flatmap(damaged),
        RAW_BYTES,
    )


def json_line_files(lines: Sequence[Mapping[str, Any]]) -> st.SearchStrategy[bytes]:
    """Draw files with a JSON object per line."""
    whole = [json.dumps(line).encode() for line in lines]
    any_line = st.one_of(json_files(lines), st.sampled_from(whole), st.sampled_from(whole))
    return st.lists(any_line, max_size=6).map(lambda parts: b"\n".join([*parts, b""]))


def yaml_files(documents: Sequence[Any]) -> st.SearchStrategy[bytes]:
    texts = [yaml.safe_dump(document).encode() for document in documents]
    return st.one_of(
        changed(documents).map(lambda document: json.dumps(document).encode()),
        changed(documents).map(_dump_yaml),
        st.sampled_from(texts).flatmap(damaged),
        RAW_BYTES,
    )


def _dump_yaml(document: Any) -> bytes:
    return yaml.safe_dump(document).encode(errors="surrogatepass")


def large_json_files(size: int) -> Iterator[bytes]:
    """Yield JSON of `size` bytes that takes many times as much memory as Python objects, or is nested deeply."""
    yield b'{"a":[' + b"[]," * (size // 3 - 4) + b"[]]}"
    yield b'{"a":[' + b"{}," * (size // 3 - 4) + b"{}]}"
    yield b"{" + b",".join(b'"%x":[]' % number for number in range(size // 12)) + b"}"
    yield b'{"a":' * (size // 5)
    yield b'{"a":"' + b"x" * (size - 8) + b'"}'
    yield b'{"a":' + b"9" * (size - 6) + b"}"


def large_yaml_files() -> Iterator[bytes]:
    """Yield YAML that is small and stands for 10^9 values, is nested deeply, or has a number with many digits."""
    levels = [b"a0: &a0 [" + b"x," * 9 + b"x]"]
    levels += [b"a%d: &a%d [" % (n, n) + b",".join([b"*a%d" % (n - 1)] * 10) + b"]" for n in range(1, 9)]
    yield b"\n".join(levels)
    yield b"\n".join([*levels, b"model: {options: {a: *a8}, name: *a8}", b"schedule: {name: *a8}", b"run: *a8"])
    yield b"model:\n  options:\n    " + b"\n    ".join(levels)
    yield b"model: " + b"[" * 100_000
    yield b"run: {epochs: " + b"9" * 100_000 + b"}"
