"""Memory of a rank: freed host memory, and when Python collects garbage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def release_free_memory() -> None:
    """Return freed host memory to the system (malloc_trim(3)). The C library would keep it for this process."""
    # AttributeError: another C library than glibc.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


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
