from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.codec import decode
from engine.gpus.snapshot import Snapshot
from tui.screens.phrases import gpu_name

RECORDING = Path(__file__).parents[2] / "recordings" / "eight-gpus.jsonl"


@pytest.fixture
def snapshot() -> Snapshot:
    return decode(RECORDING.read_text().splitlines()[0], Snapshot)


def test_gpu_name_is_index_on_this_host(snapshot: Snapshot) -> None:
    assert gpu_name(str(snapshot.gpus[3].uuid), snapshot) == "3"


def test_gpu_name_of_mig_instance_has_index_and_instance(snapshot: Snapshot) -> None:
    assert gpu_name(snapshot.gpus[7].instances[1].uuid, snapshot) == "7:2"
