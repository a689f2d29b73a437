"""Encode the records of TensorBoard event files: TFRecord framing around `Event` protocol buffers.

`engine.runs.tensorboard` writes them, `engine.watch.tensorboard` reads those of other programs.
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details and `event.proto`, `summary.proto` in
https://github.com/tensorflow/tensorboard. tensorboardX would import torch into the process that owns a run.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from ctypes import c_float
from functools import cache

_VERSION = "brain.Event:2"
SESSION_START = 1
_POLYNOMIAL, _ALL_BITS, _MASK_DELTA = 0x82F6_3B78, 0xFFFF_FFFF, 0xA282_EAD8
VARINT, I64, LEN, I32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


def version_record(time: float) -> bytes:
    """Return the first record of a file."""
    return _frame(_event(time, 0, _text(3, _VERSION)))


def session_start_record(time: float, step: int) -> bytes:
    """Return the record that makes TensorBoard drop what an earlier session wrote of this step and later ones."""
    return _frame(_event(time, step, _message(7, _varint(1 << 3 | VARINT) + _varint(SESSION_START))))


def scalars_record(time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Return the record of the values of a step by their tags. They are stored as float32."""
    values = [_message(1, _text(1, tag) + _varint(2 << 3 | I32) + _float32(value)) for tag, value in scalars.items()]
    return _frame(_event(time, step, _message(5, b"".join(values))))


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of TFRecord: CRC-32C (Castagnoli), rotated and offset."""
    table, crc = _crc32c_table(), _ALL_BITS
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= _ALL_BITS
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL_BITS


@cache
def _crc32c_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


def _frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))


def _event(time: float, step: int, content: bytes) -> bytes:
    """Encode an `Event`. Protocol buffers omit a number that is 0."""
    numbered = _varint(2 << 3 | VARINT) + _varint(step) if step else b""
    return _varint(1 << 3 | I64) + struct.pack("<d", time) + numbered + content


def _text(number: int, text: str) -> bytes:
    return _message(number, text.encode())


def _message(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | LEN) + _varint(len(data)) + data


def _float32(value: float) -> bytes:
    # struct refuses what is too large for a float32; here it becomes infinite.
    return bytes(c_float(value))


def _varint(value: int) -> bytes:
    """Encode a number from 0 up: 7 bits a byte, the lowest first."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
