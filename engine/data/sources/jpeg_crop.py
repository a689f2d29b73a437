"""Cut the part of a JPEG file that shows a box, without decoding it: a small JPEG that is decoded instead of the file.

A restart marker resets the entropy coding, so the segments between two markers can be copied to another file (ITU-T
T.81, E.1.4). `gputrain pack` writes a marker every few MCUs. `engine.data.sources.jpeg` decodes the result.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from engine.data.sources.base import Box
from engine.data.sources.jpeg_header import JpegHeader

_END_MARKER = b"\xff\xd9"
# 4:2:0 at 16 megapixels with an interval of one MCU.
MAX_SEGMENTS = 1 << 16
# The second bytes of consecutive restart markers, which are numbered 0 to 7 and start again.
_RESTART_CODES = np.tile(np.arange(0xD0, 0xD8, dtype=np.uint8), MAX_SEGMENTS // 8)
_SIZE_OFFSET = 5  # of the height in a frame header, then comes the width
# Luma at one to four times the resolution of chroma: 4:4:4, 4:2:2, 4:2:0 and 4:1:1. Others are hardly used.
COLOR_SAMPLINGS = tuple((luma, (1, 1), (1, 1)) for luma in ((1, 1), (2, 1), (2, 2), (4, 1)))
# A cut takes 40 µs, a fifth of what a larger share saves.
MAX_CUT_SHARE = 0.9


@dataclass(frozen=True)
class JpegCut:
    """A JPEG file of a part of an image, whose upper left pixel is (`left`, `top`) in the whole image."""

    data: bytearray
    left: int
    top: int
    width: int
    height: int


def cut_jpeg(data: bytes | memoryview, header: JpegHeader, box: Box, denominator: int = 1) -> JpegCut | None:
    """Cut a JPEG that shows `box`, in pixels of the whole image, with the same pixels as the file at 1 / `denominator`.

    None if the file has no usable restart markers, or if the box needs most of the file. Damage outside of the cut goes
    unnoticed, except that the restart markers of the whole file are checked.
    """
    interval = header.restart_interval
    if not interval or header.is_progressive or header.scan_components != len(header.sampling):
        return None
    if len(header.sampling) > 1 and header.sampling not in COLOR_SAMPLINGS:
        return None
    mcu_width, mcu_height = header.mcu_size
    columns, rows = -(-header.width // mcu_width), -(-header.height // mcu_height)
    # Segments that end within a row of MCUs are cut by columns, too. Otherwise, `band_rows` rows end with a segment.
    band_rows = interval // gcd(columns, interval)
    band_segments = columns * band_rows // interval
    segment_width = mcu_width * (interval if band_rows == 1 else columns)
    band_height = mcu_height * band_rows
    margin_x, margin_y = _upsampling_margins(header, denominator)
    first_column, first_band = max(box[0] - margin_x, 0) // segment_width, max(box[1] - margin_y, 0) // band_height
    end_column = -(-min(box[2] + margin_x, header.width) // segment_width)
    end_band = -(-min(box[3] + margin_y, header.height) // band_height)
    left, top = first_column * segment_width, first_band * band_height
    width = min(end_column * segment_width, header.width) - left
    height = min(end_band * band_height, header.height) - top
    if width * height > MAX_CUT_SHARE * header.width * header.height or width <= _min_width(header, denominator):
        return None

    ends = _find_segment_ends(data, header.scan_start, -(-columns * rows // interval))
    if ends is None:
        return None
    starts = np.empty_like(ends)
    starts[0], starts[1:] = header.scan_start, ends[:-1] + 2
    if band_rows == 1:
        bands, segments = slice(first_band, end_band), slice(first_column, end_column)
        piece_starts = starts.reshape(rows, band_segments)[bands, first_column]
        segment_ends = ends.reshape(rows, band_segments)[bands, segments]
    else:
        segments = slice(first_band * band_segments, end_band * band_segments)
        piece_starts, segment_ends = starts[segments][:1], ends[segments][None]
    # Each band is one piece, from its first segment to the marker after its last one.
    piece_ends = segment_ends[:, -1] + 2
    view = memoryview(data)
    pieces = [view[start:end] for start, end in zip(piece_starts.tolist(), piece_ends.tolist(), strict=True)]
    cut = bytearray().join([view[: header.scan_start], *pieces])
    lengths = piece_ends - piece_starts
    shifts = header.scan_start + 1 + lengths.cumsum() - piece_ends
    markers = (segment_ends + shifts[:, None]).ravel()
    np.frombuffer(cut, np.uint8)[markers] = _RESTART_CODES[: len(markers)]
    cut[-2:] = _END_MARKER
    struct.pack_into(">HH", cut, header.frame_start + _SIZE_OFFSET, height, width)
    return JpegCut(cut, left, top, width, height)


def _upsampling_margins(header: JpegHeader, denominator: int) -> tuple[int, int]:
    """Return the pixels beside a box, horizontally and vertically, whose chroma its pixels depend on.

    libjpeg-turbo's "fancy" upsampling of chroma reads the neighbors of a sample.
    """
    margin = 2 * denominator
    horizontal, vertical = ({factors[axis] for factors in header.sampling} for axis in (0, 1))
    return margin if len(horizontal) > 1 else 0, margin if len(vertical) > 1 else 0


def _min_width(header: JpegHeader, denominator: int) -> int:
    """Return the width of two chroma samples, which libjpeg-turbo upsamples in another way (jdsample.c)."""
    return 2 * denominator * max(h for h, _ in header.sampling)


def _find_segment_ends(data: bytes | memoryview, scan_start: int, count: int) -> NDArray[np.int64] | None:
    """Return the offset of the marker after each of `count` segments; None if there are others than these."""
    scan = np.frombuffer(data, np.uint8, offset=scan_start)
    if bytes(data[-2:]) != _END_MARKER:
        return None
    prefixes = np.flatnonzero(scan == 0xFF)
    codes = scan[prefixes + 1]
    # 0xFF 0x00 is a byte of entropy-coded data.
    is_marker = codes != 0
    codes = codes[is_marker]
    ends: NDArray[np.int64] = prefixes[is_marker] + scan_start
    if len(ends) != count or count > MAX_SEGMENTS or (codes[:-1] != _RESTART_CODES[: count - 1]).any():
        return None
    return ends
