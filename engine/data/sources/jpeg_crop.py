"""Cut the part of a JPEG file that shows a box, without decoding it: a small JPEG that is decoded instead of the file.

A restart marker resets the entropy coding, so the segments between two markers can be copied to another file (ITU-T
T.81, E.1.4). `gputrain data pack` writes a marker every few MCUs. Of other files, the rows below the box are skipped.
`engine.data.sources.jpeg` decodes the result.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from engine.data.sources.base import Box
from engine.data.sources.jpeg_header import JpegHeader

_END_CODE, _END_MARKER = b"\xd9", b"\xff\xd9"
_MARKER_BYTES = 2
# Luma at one to four times the resolution of chroma: 4:4:4, 4:2:2, 4:2:0 and 4:1:1. Others are hardly used.
COLOR_SAMPLINGS = tuple((luma, (1, 1), (1, 1)) for luma in ((1, 1), (2, 1), (2, 2), (4, 1)))
# 4:2:0 at 16 megapixels with an interval of one MCU.
MAX_SEGMENTS = 1 << 16
# The second bytes of consecutive restart markers, which are numbered 0 to 7 and start again.
_RESTART_CODES = bytes(range(0xD0, 0xD8)) * (MAX_SEGMENTS // 8)
_SIZE_OFFSET = 5  # of the height in a frame header, then comes the width
# A cut takes 50 to 80 µs, which the decoder must save.
MAX_CUT_SHARE = 0.9


@dataclass(frozen=True)
class JpegCut:
    """A JPEG file of a part of an image, whose upper left pixel is (`left`, `top`) in the whole image.

    With `has_more_rows`, the file has the data of more rows than its header says, of which libjpeg-turbo warns.
    """

    data: bytearray
    left: int
    top: int
    width: int
    height: int
    has_more_rows: bool = False


def cut_jpeg(data: bytes | memoryview, header: JpegHeader, box: Box, denominator: int = 1) -> JpegCut | None:
    """Cut a JPEG that shows `box`, in pixels of the whole image, with the same pixels as the file at 1 / `denominator`.

    None if the file has no usable restart markers, or if the box needs most of the file. Damage outside of the cut goes
    unnoticed, except that the restart markers of the whole file are checked.
    """
    interval = header.restart_interval
    if not interval or not _is_one_scan(data, header):
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
    # libjpeg-turbo's "fancy" upsampling of chroma reads the neighbors of a sample.
    margin_x = 2 * denominator if mcu_width > 8 else 0
    margin_y = 2 * denominator if mcu_height > 8 else 0
    first_column, first_band = max(box[0] - margin_x, 0) // segment_width, max(box[1] - margin_y, 0) // band_height
    end_column = -(-min(box[2] + margin_x, header.width) // segment_width)
    end_band = -(-min(box[3] + margin_y, header.height) // band_height)
    left, top = first_column * segment_width, first_band * band_height
    width = min(end_column * segment_width, header.width) - left
    height = min(end_band * band_height, header.height) - top
    # libjpeg-turbo upsamples chroma of at most two samples per row in another way (jdsample.c).
    is_narrow = width <= mcu_width // 4 * denominator
    if is_narrow or width * height > MAX_CUT_SHARE * header.width * header.height:
        return None

    marks = _find_marks(data, header.scan_start, -(-columns * rows // interval))
    if marks is None:
        return None
    starts, ends = marks[:-1], marks[1:]
    if band_rows == 1:
        bands, segments = slice(first_band, end_band), slice(first_column, end_column)
        starts = starts.reshape(rows, band_segments)[bands, segments]
        ends = ends.reshape(rows, band_segments)[bands, segments]
    else:
        segments = slice(first_band * band_segments, end_band * band_segments)
        starts, ends = starts[None, segments], ends[None, segments]
    # Each band is one piece, from its first segment to the marker after its last one.
    view = memoryview(data)
    limits = zip(starts[:, 0].tolist(), ends[:, -1].tolist(), strict=True)
    pieces = [view[start + _MARKER_BYTES : end + _MARKER_BYTES] for start, end in limits]
    cut = bytearray().join([view[: header.scan_start], *pieces])
    marker_codes = (ends - starts).cumsum() + (header.scan_start - 1)
    np.frombuffer(cut, np.uint8)[marker_codes] = np.frombuffer(_RESTART_CODES, np.uint8, len(marker_codes))
    cut[-2:] = _END_MARKER
    struct.pack_into(">HH", cut, header.frame_start + _SIZE_OFFSET, height, width)
    return JpegCut(cut, left, top, width, height)


def skip_rows_below(data: bytes | memoryview, header: JpegHeader, bottom: int, denominator: int = 1) -> JpegCut | None:
    """Return the JPEG without the rows from `bottom` on, in pixels of the whole image. None if that saves little."""
    if not _is_one_scan(data, header):
        return None
    _, mcu_height = header.mcu_size
    margin = 2 * denominator if mcu_height > 8 else 0
    height = -(-(bottom + margin) // mcu_height) * mcu_height
    if height > MAX_CUT_SHARE * header.height:
        return None
    cut = bytearray(data)
    struct.pack_into(">H", cut, header.frame_start + _SIZE_OFFSET, height)
    return JpegCut(cut, 0, 0, header.width, height, has_more_rows=True)


def _is_one_scan(data: bytes | memoryview, header: JpegHeader) -> bool:
    """Whether all pixels are in one scan, from top to bottom, and the file is not truncated."""
    is_sequential = not header.is_progressive and header.scan_components == len(header.sampling)
    return is_sequential and bytes(data[-2:]) == _END_MARKER


def _find_marks(data: bytes | memoryview, scan_start: int, count: int) -> NDArray[np.int64] | None:
    """Return the offset of the marker before the first of `count` segments, as if there were one, and of the marker
    after each. None if there are others than these."""
    scan = np.frombuffer(data, np.uint8, offset=scan_start)
    if count > MAX_SEGMENTS:
        return None
    prefixes = (scan == 0xFF).nonzero()[0]
    codes = scan[prefixes + 1]
    # 0xFF 0x00 is a byte of entropy-coded data.
    markers = codes.nonzero()[0]
    if codes[markers].tobytes() != _RESTART_CODES[: count - 1] + _END_CODE:
        return None
    marks = np.empty(count + 1, np.int64)
    marks[0] = scan_start - _MARKER_BYTES
    marks[1:] = prefixes[markers] + scan_start
    return marks
