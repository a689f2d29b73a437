"""When Python collects the garbage of a rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def manual_gc() -> Iterator[None]:
    """Disable automatic garbage collection, so that the ranks collect at the same steps.

    Existing objects are frozen (`gc.freeze`), because traversing everything that is imported takes 0.1 s. On exit the
    previous state is restored.
    """
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
