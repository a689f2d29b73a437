"""`gputrain doctor`: findings and advice; a check that hangs does not block it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len

from engine.base.codec import decode
from engine.base.trust import name_of_user
from engine.gpus.snapshot import Gpu, Snapshot
from engine.jobs.doctor import examine as examining
from engine.jobs.doctor import gpus as doctor_gpus
from engine.jobs.doctor import software
from engine.jobs.doctor.check import Check
from engine.jobs.doctor.gpus import count_nvidia_cards, gpu_checks, no_driver_check
from engine.jobs.doctor.machine import runs_folder_check
from support.gpu.fake_gpu_host import (
    COMPILER,
    NO_COMPILER,
    UNKNOWN_PID,
    FakeGpuHost,
    gpu_line,
    load_fake_driver,
)
from support.gpu.reservations import make_reservation
from support.gputrain_command import ROOT, Gputrain, wait_for
from support.messages import says
from support.replace import replace
from tui.screens.tables.doctor import merge_gpus

RECORDING = ROOT / "tests" / "recordings" / "eight-gpus.jsonl"
NOBODY, SOMEONE = 65534, 12345


def recorded() -> Snapshot:
    return decode(RECORDING.read_text().splitlines()[0], Snapshot)


def idle() -> Gpu:
    """Return the first recorded GPU, without processes."""
    gpu = recorded().gpus[0]
    nothing = {"throttle": replace(gpu["throttle"], value=()), "memory_used": replace(gpu["memory_used"], value=0)}
    return replace(gpu, processes=replace(gpu.processes, value=()), runs=(), **nothing)


def stub(folder: Path, package: str, program: str) -> str:
    """Return a PYTHONPATH that replaces a package by a program."""
    (folder / "stub" / package).mkdir(parents=True)
    (folder / "stub" / package / "__init__.py").write_text(program)
    return os.pathsep.join([str(folder / "stub"), os.environ.get("PYTHONPATH", "")])


def shown_check(output: str, start: str) -> str:
    """Return the check in a printed report that begins with a state and a name, in one line."""
    checks = [" ".join(check.split()) for check in re.split(r"\n(?=\S)", output)]
    return next(check for check in checks if check.startswith(f"{start} "))


# ---- Command ----


@pytest.mark.expensive("doctor imports torch and torchvision")
def test_doctor_command_without_gpus_passes(gputrain: Gputrain) -> None:
    done = gputrain("doctor", "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["format"] == 1
    checks = {check["name"]: check for check in report["checks"]}
    assert {check["area"] for check in report["checks"]} == {"machine", "GPUs", "torch"}
    assert all(set(check) == {"area", "name", "state", "found", "advice", "code"} for check in report["checks"])
    assert {checks[name]["state"] for name in ("driver", "torch", "CUDA")} == {"ok"}
    assert "torchvision" in checks["torch"]["found"]


def test_doctor_command_reports_gpu_and_torch_problems_in_80_columns(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    other = {"user": NOBODY} if os.getuid() == 0 else {}
    sleeper = gputrain.start("/bin/sleep", "100", **other)
    pid = sleeper.pid if other else 1
    gpu_host.set_scene(
        [gpu_line(index, throttle=0x20) for index in range(3)],
        [gpu_line(3), gpu_line(4, uncorrected=2), gpu_line(5), gpu_line(6), gpu_line(7)],
        [f"process 3 {pid} 500 compute", f"process 5 {UNKNOWN_PID} 500 compute"],
        "fault 7 * 15",
    )
    path = stub(gputrain.folder, "torch", "raise RuntimeError('operator torchvision::nms does not exist')")
    path = os.pathsep.join([path, gpu_host.environment.get("PYTHONPATH", "")])
    variables = gputrain.environment | gpu_host.environment | {"PYTHONPATH": path, "COLUMNS": "80"}
    del variables["CUDA_VISIBLE_DEVICES"]
    process = gputrain.start("doctor", env=variables)
    output, messages = process.communicate(timeout=60)
    assert process.returncode == 1
    assert max(map(cell_len, output.splitlines())) <= 80
    assert "\x1b" not in output
    assert says(shown_check(output, "warning GPU 0,1,2"), "gpu-throttled", "thermal → ")
    user = psutil.Process(pid).username()
    assert f"by other processes (user {user}) → `gputrain gpus --proc" in shown_check(output, "warning GPU 3")
    assert says(shown_check(output, "problem GPU 4"), "gpu-memory-errors", "2 uncorrected ECC errors")
    assert "by other processes" in shown_check(output, "warning GPU 5")
    assert says(shown_check(output, "problem GPU 7"), "gpu-lost")
    shown = ("RuntimeError: operator torchvision::nms does not exist → ", "`pip install ")
    assert says(shown_check(output, "problem torch"), "library-failed", *shown)
    assert messages == "3 problems, 5 warnings.\n"


def test_doctor_reports_hanging_driver_and_import_without_blocking(
    gpu_host: FakeGpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if COMPILER is None:
        pytest.skip(NO_COMPILER)
    load_fake_driver(gpu_host.driver)
    gpu_host.set_scene(gpu_line(0), "fault * nvmlInitWithFlags hang")
    for name, value in gpu_host.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "torch", "import time; time.sleep(1000)"))
    monkeypatch.setattr(examining, "DRIVER_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(examining, "IMPORT_TIMEOUT_SECONDS", 1.0)
    before = set(psutil.Process().children(recursive=True))
    areas = examining.examine(tmp_path)
    assert [check.area for check in next(areas)][:3] == ["machine"] * 3
    [driver], torch = areas
    assert (driver.state, driver.code) == ("problem", "driver-hangs")
    assert (torch[-1].state, torch[-1].code, " 1 s" in torch[-1].found) == ("problem", "library-failed", True)
    wait_for(lambda: set(psutil.Process().children(recursive=True)) <= before, "the end of the hung processes", 15)


# ---- Host ----


def test_runs_folder_check_reports_unusable_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert runs_folder_check(tmp_path / "not" / "there" / "yet").state == "ok"
    check = runs_folder_check(tmp_path / "file" / "runs")
    assert check.state == "problem" and "--runs-dir" in check.advice and "GPUTRAIN_RUNS" in check.advice


# ---- GPUs ----


def test_driver_check_reports_card_without_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x1002", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(doctor_gpus, "PCI_DEVICES", tmp_path)
    assert count_nvidia_cards() == 1
    assert no_driver_check("no library", 0).state == "ok"
    check = no_driver_check("no library", 1)
    assert (check.state, check.code) == ("problem", "driver-unavailable")
    assert check.found.startswith("no library") and "1 NVIDIA card" in check.found


def test_gpu_check_reports_silent_gpu_and_free_gpu() -> None:
    [check] = gpu_checks([idle().as_stale(4.0)], [])
    assert (check.state, check.code, " 4 s" in check.found) == ("problem", "driver-hangs", True)
    [check] = gpu_checks([idle()], [])
    assert check.state == "ok" and check.found.startswith("NVIDIA H100 80GB HBM3, ")


def test_doctor_reports_unreadable_reservations_beside_driver(loaded_gpu_host: FakeGpuHost, tmp_path: Path) -> None:
    loaded_gpu_host.set_scene("fault * nvmlInitWithFlags 9")
    (tmp_path / "reservations" / f"gputrain-{os.getuid()}").write_text("")
    areas = examining.examine(tmp_path)
    next(areas)
    driver, reservations = next(areas)
    areas.close()
    assert "driver not loaded" in driver.found
    assert f"{tmp_path / 'reservations'}: gputrain-{os.getuid()} " in reservations.found


def test_gpu_check_warns_only_about_runs_of_other_users() -> None:
    gpu = idle()
    [check] = gpu_checks([gpu], [make_reservation("big", os.getuid(), gpus=(gpu.uuid or "",))])
    assert check.state == "ok" and " big " in check.found and f" {name_of_user(os.getuid())})" in check.found
    [check] = gpu_checks([gpu], [make_reservation("big", SOMEONE, gpus=(gpu.uuid or "",))])
    assert (check.state, check.code, f" uid {SOMEONE})" in check.found) == ("warning", "gpu-reserved", True)


# ---- torch compatibility ----


@pytest.mark.parametrize(
    ("info", "gpus", "visible", "codes"),
    [
        (software.CudaInfo(), 0, 0, [""]),
        (software.CudaInfo(), 2, 2, ["wrong-version"]),
        (software.CudaInfo(cuda="12.8", has_nccl=True), 2, 2, [""]),
        (software.CudaInfo(cuda="12.8"), 2, 2, ["", "wrong-version"]),
        (software.CudaInfo(cuda="12.8", has_nccl=True, error="RuntimeError: no devices"), 2, 2, ["library-failed"]),
        (software.CudaInfo(cuda="12.8", has_nccl=True, error="RuntimeError: no devices"), 2, 0, [""]),
    ],
)
def test_cuda_checks_report_what_keeps_torch_from_the_gpus(
    info: software.CudaInfo, gpus: int, visible: int, codes: list[str]
) -> None:
    checks = list(software.cuda_checks(info, gpus, visible))
    assert [check.code for check in checks] == codes
    assert not info.error or (info.error in checks[0].found) == bool(visible)


# ---- Table ----


def test_merge_gpus_merges_identical_gpu_checks() -> None:
    checks = [Check("GPUs", f"GPU {index}", "ok", "free", gpu=index) for index in (0, 1, 2, 5)]
    other = Check("GPUs", "GPU 3", "warning", "hot", gpu=3, code="gpu-throttled")
    assert [check.name for check in merge_gpus([*checks, other])] == ["GPU 0,1,2,5", "GPU 3"]
    assert list(other.to_dict().values()) == ["GPUs", "GPU 3", "warning", "hot", "", "gpu-throttled"]
