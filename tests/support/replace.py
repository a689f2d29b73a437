"""`dataclasses.replace` for records of the codec, too."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from engine.base import codec

T = TypeVar("T")


def replace(value: T, /, **changes: Any) -> T:
    """Return a copy of a record or a dataclass with other values of some fields."""
    copy: Any = dataclasses.replace if dataclasses.is_dataclass(value) else codec.replace
    return copy(value, **changes)
