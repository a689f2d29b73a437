"""Batches of tar shards: the same for any number of workers, and after a resume within an epoch."""

from __future__ import annotations

import pytest

from support.data.tar_shards import write_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("shards"), shards=6, images=12)
