"""Python's garbage collector at chosen moments: at any other it makes one step slow, and with it all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting_between() -> Iterator[Callable[[], None]]:
    """Nothing is collected but by the function that this gives, and what was there before is not looked at again. What
    was there of it is back afterwards. Without cycles objects go when they are no longer used, as everywhere."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield _collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect() -> None:
    gc.collect()
