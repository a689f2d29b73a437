"""`device.gpus=auto` on a host with GPUs that cannot be used: the run trains on the CPU and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.codec import decode, encode
from engine.config.schema import Config
from engine.gpus import allocation, device_preview, driver
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.device_preview import preview_allocation
from engine.gpus.driver import describe_cpu_fallback
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.selection import CudaDevice
from engine.gpus.snapshot import Snapshot
from engine.jobs.launch.preflight_process import PreflightResult
from engine.runs.events import WarningEvent
from engine.runs.history import history_from_events
from engine.runs.run_record import StoredForm, read_back, stored_form
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line
from support.gputrain_command import ROOT
from support.messages import has_problem, raises_problem
from support.replace import replace
from support.runs.event_factories import make_run_started
from support.runs.factories import make_gpu_run_started
from tui.form.checks import FormCheckResult
from tui.form.plan import plan_text

EIGHT_GPUS = decode((ROOT / "tests" / "recordings" / "eight-gpus.jsonl").read_text().splitlines()[0], Snapshot)
NO_GPUS = replace(EIGHT_GPUS, gpus=())
BROKEN = replace(NO_GPUS, error="driver/library version mismatch")
RESERVED = CudaDevice(0, "GPU-1", "H100", 0, unavailable=Unavailable(Obstacle.RESERVED, "reserved by run a (user b)"))


@pytest.fixture
def device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder /dev, with an NVIDIA GPU."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(driver, "DEVICE_FILES", tmp_path)
    return tmp_path


def set_driver_library(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    for module in (allocation, device_preview, driver):
        monkeypatch.setattr(module, "has_driver_library", lambda: installed)


@pytest.mark.parametrize(
    ("installed", "snapshot", "values"),
    [
        (False, None, ["(libnvidia-ml.so.1 not found; ", "NVIDIA_DRIVER_CAPABILITIES=compute,utility", "/nvidia0"]),
        (True, None, []),
        (True, BROKEN, [BROKEN.error, "/nvidia0"]),
        (True, replace(BROKEN, pending=True), [BROKEN.error, "`gputrain doctor`"]),
        (True, NO_GPUS, ["/nvidia0"]),
        (True, EIGHT_GPUS, ["CUDA_VISIBLE_DEVICES=''", "8 GPUs"]),
    ],
)
def test_auto_on_host_with_gpus_says_why_it_uses_cpu(
    device_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    snapshot: Snapshot | None,
    values: list[str],
) -> None:
    set_driver_library(monkeypatch, installed=installed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = preview_allocation("auto", snapshot, wait=False)
    assert (found.devices, found.warnings) == ([], [found.cpu_fallback])
    assert has_problem(found.warnings, "gpu-fallback", "", *values)
    assert preview_allocation("cpu", snapshot, wait=False).warnings == []


@pytest.mark.parametrize("snapshot", [None, BROKEN, NO_GPUS])
def test_auto_on_host_without_gpus_uses_cpu_without_warning(
    device_files: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot | None
) -> None:
    (device_files / "nvidia0").unlink()
    set_driver_library(monkeypatch, installed=snapshot is not None)
    assert preview_allocation("auto", snapshot, wait=False).warnings == []


def test_named_gpu_on_host_with_broken_driver_is_refused(device_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_driver_library(monkeypatch, installed=True)
    with raises_problem("driver-unavailable", "device.gpus", "0 ", BROKEN.error, "--gpus cpu"):
        preview_allocation("0", BROKEN, wait=False)


def test_allocation_says_that_variable_hides_gpus(
    loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded_gpu_host.set_scene(gpu_line(0), gpu_line(1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found = allocate_devices("auto", "run", wait=False, on_wait=print)
    assert found.warnings == [found.cpu_fallback]
    assert has_problem(found.warnings, "gpu-fallback", "", "CUDA_VISIBLE_DEVICES='7'", "2 GPUs")


@pytest.mark.parametrize("selection", ["cpu", "auto"])
def test_runs_that_wait_for_cpu_get_it_one_after_the_other(
    device_files: Path, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    (device_files / "nvidia0").unlink()
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(device_files))
    monkeypatch.setattr(allocation, "WAIT_POLL_SECONDS", 0.0)
    set_driver_library(monkeypatch, installed=False)
    reasons: list[str] = []

    def allocate(run: str, *, wait: bool = True, share: int = 1) -> GpuAllocation:
        def end_first_run(reason: str) -> None:
            reasons.append(reason)
            first.reservation.release()

        terms = QueueTerms(share=share), ""
        return allocate_devices(selection, run, wait=wait, on_wait=end_first_run, poll_terms=lambda: terms)

    first = allocate("first", share=2)
    # A run that does not wait does not count, and one that shares the CPU joins.
    others = [allocate("other", wait=False), allocate("sharing", share=2)]
    assert reasons == []
    others[1].reservation.release()
    second = allocate("second")
    assert len(reasons) == 1 and "run first " in reasons[0]
    assert (second.devices, second.warnings) == ([], [])
    assert [each.run for each in read_reservations()] == ["second"]
    second.reservation.release()


def test_reserved_gpus_are_named_with_their_user() -> None:
    warning = describe_cpu_fallback(EIGHT_GPUS, [RESERVED], {})
    assert warning is not None
    assert has_problem([warning], "gpu-fallback", "", "(GPU 0: reserved by run a (user b))", "--queue", "--gpus")


def test_summary_contains_reason_until_run_resumes_on_gpus() -> None:
    events = [
        WarningEvent(message="no GPU is free", code="gpu-fallback", cpu_fallback=True),
        make_run_started(),
        WarningEvent(message="b", code="no-effect"),
    ]
    summary = history_from_events(events).record()
    assert summary.cpu_fallback == "no GPU is free"
    assert read_back(decode(encode(stored_form(summary)), StoredForm)).cpu_fallback == "no GPU is free"
    assert history_from_events([*events, make_gpu_run_started()]).cpu_fallback == ""


def test_form_shows_reason_in_plan() -> None:
    result = FormCheckResult(PreflightResult(on_gpu=False, cpu_fallback="no GPU is free \x1b"))
    lines = plan_text(Config(), [], result).plain.splitlines()
    assert lines[0] == "! no GPU is free \\x1b"
    assert lines[1].startswith("1 CPU rank, ")
