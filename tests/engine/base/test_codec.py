"""The codec: what is written is read back as it was, and what is not valid is refused with place and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest

from engine.base.codec import (
    UNSET,
    Count,
    FileRecord,
    Finite,
    InvalidRecordError,
    Meta,
    Record,
    UnsetType,
    decode,
    encode,
    encode_indented,
    field,
    find_record,
    find_user_record,
    finite,
    overwrite_record,
    read_record,
    write_record,
    write_user_record,
)

Text = Annotated[str, Meta(max_length=3)]


class Part(Record, kw_only=True, frozen=True):
    number: Count
    name: str = ""


class Sample(FileRecord, kw_only=True, frozen=True):
    loss: Finite | UnsetType | None = UNSET
    parts: tuple[Part, ...] = ()
    note: str = ""
    named: dict[str, Part] = field(default_factory=dict)
    texts: Annotated[tuple[Text, ...], Meta(max_length=3)] = ()
    numbers: tuple[Count, ...] = ()


@pytest.mark.parametrize("loss", [0.1 + 0.2, 5e-324, None, UNSET])
def test_codec_keeps_value_not_finite_and_unknown_apart(loss: float | UnsetType | None) -> None:
    data = encode(Sample(loss=loss))
    assert (b"loss" in data) == (loss is not UNSET)
    assert decode(data, Sample).loss == loss


def test_codec_writes_nan_and_infinity_as_null() -> None:
    assert [finite(float(text)) for text in ("nan", "inf", "-inf", "1")] == [None, None, None, 1.0]
    assert decode(encode(Sample(loss=float("nan"))), Sample).loss is None


@pytest.mark.parametrize(
    ("text", "data"),
    [("ä\x9b\x7f", rb"\u00e4\u009b\u007f"), ("\U0001f600\n", rb"\ud83d\ude00\n"), ("a\udcff", rb"a\udcff")],
)
def test_codec_writes_printable_ascii(text: str, data: bytes) -> None:
    assert data in encode(Sample(note=text))
    assert decode(encode(Sample(note=text)), Sample).note == text


def test_codec_keeps_path_that_is_no_utf8() -> None:
    data = encode(Sample(note="cat/\udcff.png", loss=float("nan")))
    assert data.isascii()
    assert decode(encode_indented(Sample(note="cat/\udcff.png")), Sample).note == "cat/\udcff.png"
    assert decode(data, Sample) == Sample(note="cat/\udcff.png", loss=None)
    with pytest.raises(InvalidRecordError, match="not valid JSON"):
        decode(data.replace(b"null", b"NaN"), Sample)


@pytest.mark.parametrize("note", [rb"\ud800", rb"\ud800\udcff\udcff\ud800", rb"\udcff\udd00"])
def test_codec_refuses_surrogates_that_no_path_has(note: bytes) -> None:
    with pytest.raises(InvalidRecordError, match="not valid JSON"):
        decode(b'{"format":1,"note":"' + note + b'"}', Sample)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"format":1,"parts":[{"number":1},{"number":-1}]}', "is damaged: $.parts[1].number: expected int >= 0"),
        (b'{"format":1,"note":5}', "is damaged: $.note: expected str, got int"),
        (b'{"format":1,"loss":1e999}', "is damaged: $.loss: number out of range"),
        (b'{"format":1,"parts":[{"number":' + b"9" * 5000 + b"}]}", "is damaged: $.parts[0].number"),
        (b'{"format":1,"loss":NaN}', "is damaged: it is not valid JSON"),
        (b'{"format":1,"note":"\\ud800"}', "is damaged: it is not valid JSON"),
        (b'{"format":1,"note":"\xff"}', "is damaged: it is not valid JSON"),
        (b'{"format":1,"later":' + b"[" * 500_000, "is damaged: it is nested too deeply"),
        (b'{"format":1', "is damaged: it is not valid JSON"),
        (b"[]", "is damaged: $: expected object, got array"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_codec_refuses_invalid_data_with_place_and_reason(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRecordError) as raised:
        decode(data, Sample)
    assert (str(raised.value)[: len(message)], raised.value.code) == (message, "damaged")


@pytest.mark.parametrize("version", ["0", "2", "true", '"1"', "null", "[]"])
def test_codec_refuses_other_formats(version: str) -> None:
    with pytest.raises(InvalidRecordError) as raised:
        decode(f'{{"format":{version}}}'.encode(), Sample)
    assert raised.value.code == "wrong-version"


def test_codec_finds_nothing_in_missing_large_or_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert find_record(path, Sample) is None
    write_record(path, Sample(note="a" * 100))
    assert find_record(path, Sample, max_bytes=100) is None
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert find_record(path, Sample) is None
    path.write_bytes(b"{")
    assert find_record(path, Sample) is None
    path.write_bytes(b'{"format":1,"note":5}')
    assert find_record(path, Sample) is None


def test_codec_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_record(path, Sample(loss=None, note="long enough"))
    assert path.read_text().startswith('{\n  "format": 1,\n  "loss": null,')
    assert read_record(path, Sample) == Sample(loss=None, note="long enough")
    overwrite_record(path, Sample())
    assert read_record(path, Sample) == Sample()
    write_user_record(tmp_path, "b.json", Sample(note="b"))
    assert find_user_record(tmp_path, "b.json", Sample) == Sample(note="b")
    (tmp_path / "b.json").chmod(0o666)
    assert find_user_record(tmp_path, "b.json", Sample) is None
