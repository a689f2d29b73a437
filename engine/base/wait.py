"""Wait for something that another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.05


def wait_until(condition: Callable[[], T], timeout_s: float) -> T:
    """Call `condition` until it returns something true, for `timeout_s` at most. Return its last result."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return result
