"""Every record class as a reader: valid documents that its types describe, and what the codec does with others."""

from __future__ import annotations

import contextlib
import copy
import json
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from inputs import json_files, odd_documents
from msgspec import inspect

from engine.base.codec import InvalidRecordError, Record, decode, encode
from support.records import record_name

# Documents with several changes for each valid one. To draw one takes a millisecond, to replace a single value 50 us.
NUM_DAMAGED = 5
# The first batches replace each value.
MAX_ODD_BATCHES = 30
MAX_ITEMS = 3


@cache
def documents(kind: type[Record]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw JSON objects that are valid records of this class, with and without each field that may be absent."""
    [info] = inspect.multi_type_info([kind])
    assert isinstance(info, inspect.StructType)
    return _objects(info)


def _objects(info: inspect.StructType | inspect.DataclassType) -> st.SearchStrategy[dict[str, Any]]:
    required = {part.encode_name: _values(part.type) for part in info.fields if part.required}
    optional = {part.encode_name: _values(part.type) for part in info.fields if not part.required}
    if isinstance(info, inspect.StructType) and info.tag_field is not None:
        required[info.tag_field] = st.just(info.tag)
    return st.fixed_dictionaries(required, optional=optional)


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.Metadata(type=inner):
            return _values(inner)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(kind.ge if kind.gt is None else kind.gt + 1, kind.le if kind.lt is None else kind.lt - 1)
        case inspect.FloatType():
            return st.floats(
                _first(kind.ge, kind.gt),
                _first(kind.le, kind.lt),
                exclude_min=kind.gt is not None,
                exclude_max=kind.lt is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern)
        case inspect.StrType():
            return st.text(
                st.characters(codec="utf-8"), min_size=kind.min_length or 0, max_size=min(kind.max_length or 8, 8)
            )
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.EnumType(cls=cls):
            return st.sampled_from([member.value for member in cls])
        case inspect.UnionType(types=types):
            return st.one_of([_values(inner) for inner in types])
        case inspect.TupleType(item_types=types):
            return st.tuples(*map(_values, types)).map(list)
        case inspect.CollectionType(item_type=inner):
            low = kind.min_length or 0
            return st.lists(_values(inner), min_size=low, max_size=max(low, min(kind.max_length or 8, MAX_ITEMS)))
        case inspect.DictType():
            low = kind.min_length or 0
            keys = _values(kind.key_type)
            keys = keys if isinstance(_bare(kind.key_type), inspect.StrType | inspect.LiteralType) else keys.map(str)
            return st.dictionaries(keys, _values(kind.value_type), min_size=low, max_size=max(low, MAX_ITEMS))
        case inspect.StructType(cls=type() as cls) if issubclass(cls, Record):
            return st.deferred(lambda: documents(cls))
        case inspect.StructType() | inspect.DataclassType():
            return st.deferred(lambda: _objects(kind))
        case inspect.AnyType():
            return st.one_of(st.none(), st.booleans(), st.text(max_size=4))
        case _:
            raise NotImplementedError(f"no documents for {kind}")


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _first(inclusive: float | None, exclusive: float | None) -> float | None:
    return exclusive if inclusive is None else inclusive


def damaged_documents(kind: type[Record]) -> st.SearchStrategy[tuple[dict[str, Any], list[bytes]]]:
    """Draw a valid document of a record, and `NUM_DAMAGED` that are changed or damaged."""

    def damage(document: dict[str, Any]) -> st.SearchStrategy[tuple[dict[str, Any], list[bytes]]]:
        return st.tuples(
            st.just(document), st.lists(json_files([document]), min_size=NUM_DAMAGED, max_size=NUM_DAMAGED)
        )

    return documents(kind).flatmap(damage)


def fuzz_record(kind: type[Record], batches: int, odd_batches: int = MAX_ODD_BATCHES) -> int:
    """Decode documents of a record class, hundreds in each of the first `odd_batches`. Return how many."""
    checked, decoded, valid = 0, 0, False

    @seed(0)
    @settings(
        max_examples=batches,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # Without the search for a smaller input, which would read hundreds of documents in each step.
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(damaged_documents(kind))
    def check(drawn: tuple[dict[str, Any], list[bytes]]) -> None:
        nonlocal checked, decoded, valid
        document, damaged = drawn
        with contextlib.suppress(InvalidRecordError):
            decode(json.dumps(document), kind)
            # A check in the class itself may refuse others that its types allow.
            valid = True
        checked += 1
        if checked <= odd_batches:
            damaged += [json.dumps(odd).encode() for odd in odd_documents(copy.deepcopy(document))]
        for data in damaged:
            read_record(kind, data)
        decoded += len(damaged)

    check()
    assert valid, f"no document that was made for {record_name(kind)} is valid"
    return decoded


def read_record(kind: type[Record], data: bytes) -> None:
    """What the codec accepts of a document, it writes and reads back unchanged."""
    try:
        with contextlib.suppress(InvalidRecordError):
            record = decode(data, kind)
            assert decode(encode(record), kind) == record
    except Exception as error:
        error.add_note(f"{record_name(kind)}: {data[:1000]!r}")
        raise
