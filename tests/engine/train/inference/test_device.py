"""The GPU of predict and evaluate: a free one, reserved while it is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.base.errors import Problem
from engine.gpus.reservation_reader import read_reservations
from engine.train.inference.device import reserve_device
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, gpu_line, gpu_uuid
from support.messages import has_problem, raises_problem


@pytest.fixture
def two_gpus(loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> FakeGpuHost:
    """A host whose GPU 0 is in use."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    loaded_gpu_host.set_scene([gpu_line(0), gpu_line(1), f"process 0 {UNKNOWN_PID} 4096 compute"])
    return loaded_gpu_host


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("selection", ["auto", "free:1", "1", gpu_uuid(1)])
def test_reserve_device_shows_chosen_gpu_until_the_end(selection: str) -> None:
    notes: list[Problem] = []
    with reserve_device(selection, "digits", notes.append) as device:
        [reservation] = read_reservations()
        assert (reservation.run, reservation.gpus) == ("digits", (gpu_uuid(1),))
        assert [(rank.pid, rank.uuid) for rank in reservation.ranks] == [(os.getpid(), gpu_uuid(1))]
        assert (device, os.environ["CUDA_VISIBLE_DEVICES"]) == ("cuda", gpu_uuid(1))
    assert (notes, read_reservations()) == ([], [])


@pytest.mark.parametrize(
    ("selection", "device", "code", "used"),
    [("auto", "cpu", "gpu-fallback", "CPU"), ("0", "cuda", "gpu-in-use", "GPU 0")],
)
def test_reserve_device_without_free_gpu(
    selection: str, device: str, code: str, used: str, two_gpus: FakeGpuHost
) -> None:
    two_gpus.set_scene([gpu_line(0), f"process 0 {UNKNOWN_PID} 4096 compute"])
    notes: list[Problem] = []
    with reserve_device(selection, "digits", notes.append) as reserved:
        assert reserved == device
        assert bool(read_reservations()) == (selection == "0")
    assert len(notes) == 1 and has_problem(notes, code, "", used)
    assert read_reservations() == []


@pytest.mark.parametrize(
    ("selection", "code", "location", "value"),
    [
        ("free:1", "gpu-in-use", "device.gpus", "1 free GPU requested, 0 available"),
        ("7", "gpu-not-found", "device.gpus", "'7'"),
        ("0,1", "not-supported", "--gpus", "0,1 "),
        ("all", "not-supported", "--gpus", "all "),
        ("free:2", "not-supported", "--gpus", "free:2 "),
        ("cuda:1", "unknown-value", "--gpus", "did you mean --gpus 1?"),
        ("cuda", "unknown-value", "--gpus", "did you mean --gpus free:1?"),
    ],
)
def test_reserve_device_refuses_several_gpus_and_those_it_cannot_have(
    selection: str, code: str, location: str, value: str, two_gpus: FakeGpuHost
) -> None:
    two_gpus.set_scene([gpu_line(0), f"process 0 {UNKNOWN_PID} 4096 compute"])
    with raises_problem(code, location, value), reserve_device(selection, "digits", print):
        pass
    assert read_reservations() == [] and os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.usefixtures("two_gpus")
def test_reserve_device_without_reservation_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path / "missing"))
    notes: list[Problem] = []
    with reserve_device("auto", "digits", notes.append) as device:
        assert (device, os.environ["CUDA_VISIBLE_DEVICES"]) == ("auto", "0,1")
    [note] = notes
    assert has_problem([note], "not-writable", "", tmp_path / "missing", "No such file")
    with raises_problem("not-writable"), reserve_device("1", "digits", notes.append):
        pass
