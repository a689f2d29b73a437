"""How the screen of the runs divides its height between the list and the preview below it."""

from __future__ import annotations

# Frame and header of the list.
LIST_FRAME_ROWS = 3
# Some key figures and two charts of eight lines.
MIN_PREVIEW_ROWS = 10
# From this height, a long list shares the room with a preview, which needs no more than `PREVIEW_ROWS`.
MIN_SHARED_ROWS, PREVIEW_ROWS = 30, 24


def list_height(room: int, runs: int, *, full: bool) -> int:
    """Return the lines of the list in `room` lines. The preview gets the rest; it is hidden if the list gets all.

    With `full`, the list gets all.
    """
    wanted = runs + LIST_FRAME_ROWS
    if full or runs == 0:
        return room
    if room >= MIN_SHARED_ROWS:
        return min(wanted, max(room // 2, room - PREVIEW_ROWS))
    return wanted if room - wanted >= MIN_PREVIEW_ROWS else room
