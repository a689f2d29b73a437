"""Python's garbage collector at chosen moments: at any other it makes one step slow, and with it all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting_between() -> Iterator[Callable[[], None]]:
    """Nothing is collected but by the function that this gives. It does not look at what is there already: to go
    through all that was imported takes a tenth of a second. Objects in no cycle go when they are no longer used, as
    ever. Afterwards all is as before."""
    was_enabled = gc.isenabled()
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
