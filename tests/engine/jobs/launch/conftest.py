"""What all tests of the owner of a run share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Undo what the owner of ranks sets in its environment, such as the GPUs that its children see."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
