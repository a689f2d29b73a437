from __future__ import annotations

from pathlib import Path

import pytest

from engine.gpus.snapshot import Snapshot
from engine.utils.codec import decode
from tui.phrases import gpu_name

RECORDING = Path(__file__).parents[1] / "recordings" / "eight-gpus.jsonl"


@pytest.fixture
def snapshot() -> Snapshot:
    return decode(RECORDING.read_text().splitlines()[0], Snapshot)


def test_gpu_name_is_index_on_this_host(snapshot: Snapshot) -> None:
    assert gpu_name(str(snapshot.gpus[3].uuid), snapshot) == "3"


def test_gpu_name_of_mig_instance_has_index_and_instance(snapshot: Snapshot) -> None:
    assert gpu_name(snapshot.gpus[7].instances[1].uuid, snapshot) == "7:2"


@pytest.mark.parametrize("known", [True, False])
def test_gpu_name_of_gpu_on_another_host_is_short_uuid(snapshot: Snapshot, known: bool) -> None:
    assert gpu_name("GPU-12345678-0000-0000-0000-000000000000", snapshot if known else None) == "GPU-12345678"


@pytest.mark.parametrize("device", ["cpu", "0"])
def test_gpu_name_of_other_device_is_unchanged(snapshot: Snapshot, device: str) -> None:
    assert gpu_name(device, snapshot) == device
