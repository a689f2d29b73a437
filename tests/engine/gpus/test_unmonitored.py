"""GPUs that torch sees on a host where NVML sees none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config.schema import Config
from engine.distributed.node_plan import plan_node, prepare_environment
from engine.distributed.torch_gpus_process import physical_id
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.unmonitored import TorchGpu, devices_from_answer, torch_may_see_gpus, unmonitored_gpus
from engine.utils.codec import replace

AMD = TorchGpu(name="AMD Instinct MI300X")


@pytest.mark.parametrize(
    ("variables", "entries"),
    [
        ({}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        ({"HIP_VISIBLE_DEVICES": "2, 5", "CUDA_VISIBLE_DEVICES": "0,1"}, ["2", "5"]),
    ],
)
def test_amd_gpus_are_selected_by_their_entry(variables: dict[str, str], entries: list[str]) -> None:
    devices = devices_from_answer([AMD, AMD], variables)
    assert [device.uuid for device in devices] == entries
    environment = dict(variables)
    prepare_environment(plan_node(Config(), devices), environment)
    used = {value for name, value in environment.items() if name.endswith("VISIBLE_DEVICES")}
    assert used == {",".join(entries)}


def test_amd_gpus_with_same_index_are_reserved_by_physical_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    monkeypatch.setattr("engine.gpus.allocation.has_driver_library", lambda: False)
    monkeypatch.setattr("engine.gpus.unmonitored.has_driver_library", lambda: False)

    def allocate(*physical_ids: str) -> GpuAllocation:
        gpus = devices_from_answer([replace(AMD, physical_id=name) for name in physical_ids], {})
        monkeypatch.setattr("engine.gpus.unmonitored.unmonitored_gpus", lambda _: gpus)
        return allocate_devices("auto", "run", wait=False, on_wait=print)

    allocations = [allocate("PCI-0", "PCI-1"), allocate("PCI-2", "PCI-3"), allocate("PCI-1", "PCI-4")]
    try:
        assert [[device.uuid for device in each.devices] for each in allocations] == [["0", "1"], ["0", "1"], ["1"]]
    finally:
        for each in allocations:
            each.reservation.release()


def test_physical_ids_that_are_not_unique_are_ignored() -> None:
    devices = devices_from_answer([replace(AMD, physical_id="PCI-0")] * 2, {})
    assert [device.reservation_id for device in devices] == ["0", "1"]


def test_physical_id_contains_pci_address_and_uuid() -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0, uuid="58580000")
    assert physical_id(gpu) == "PCI-0000:c1:00-58580000"


@pytest.mark.parametrize(
    ("libraries", "device_file", "expected"),
    [
        ([], None, False),
        ([], "nvidia0", False),
        (["libnvidia-ml.so.1", "libcuda.so.1"], None, False),
        (["libnvidia-ml.so.1", "libcuda.so.1"], "nvidia0", True),
        (["libnvidia-ml.so.1", "libcuda.so.1"], "dxg", True),
        (["libnvidia-ml.so.1", "libcuda.so.1"], "nvhost-gpu", True),
        (["libcuda.so.1"], None, True),
        (["libnvidia-ml.so.1"], "kfd", True),
    ],
)
def test_torch_may_see_gpus_with_driver_unknown_to_nvml(
    libraries: list[str], device_file: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_file is not None:
        (tmp_path / device_file).touch()
    monkeypatch.setattr("engine.gpus.unmonitored.DEVICE_FILES", tmp_path)
    monkeypatch.setattr("engine.gpus.unmonitored.has_library", libraries.__contains__)
    monkeypatch.setattr("engine.gpus.unmonitored.ROCM_DRIVER", tmp_path / "kfd")
    assert torch_may_see_gpus.__wrapped__() == expected


def test_torch_is_asked_once_per_value_of_the_visibility_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(*_: object, env: dict[str, str], **__: object) -> list[TorchGpu]:
        asked.append(env.get("ROCR_VISIBLE_DEVICES", ""))
        return [AMD]

    monkeypatch.setattr("engine.gpus.unmonitored.torch_may_see_gpus", lambda: True)
    monkeypatch.setattr("engine.gpus.unmonitored.ask_helper", answer)
    monkeypatch.setattr("engine.gpus.unmonitored._answers", {})
    for environ in ({}, {"HOME": "/"}, {"ROCR_VISIBLE_DEVICES": "1"}, {}):
        assert [device.name for device in unmonitored_gpus(environ)] == [AMD.name]
    assert asked == ["", "1"]
