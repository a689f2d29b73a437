"""`gputrain doctor`: what it finds, what it advises, and that nothing that hangs holds it up."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import Gputrain, wait_for
from gpu_host import COMPILER, NO_COMPILER, PHANTOM, GpuHost, gpu, load_here, uuid_of
from rich.cells import cell_len

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.doctor import examine as examining
from engine.doctor import gpus as doctor_gpus
from engine.doctor.check import Check
from engine.doctor.gpus import count_nvidia_cards, driver_check, gpu_checks, no_driver_check, visible_devices_check
from engine.doctor.machine import environment_checks, memory_check, runs_folder_check
from engine.doctor.run import all_reduce_check, all_reduce_devices, bus_bandwidth, data_check, device_check
from engine.doctor.software import arch_checks, cuda_check, supports_capability, torch_checks
from engine.gpus.reservation import ReservationInfo
from engine.gpus.selection import CudaDevice, Obstacle, Unavailable
from engine.gpus.snapshot import Gpu, Snapshot
from engine.utils.process import user_name
from tui.text.doctor import merge_gpus

RECORDING = Path(__file__).parent / "recordings" / "eight-gpus.jsonl"
NOBODY = 65534
OUTCOME = {"right": True, "seconds": 0.001, "bytes": 64 << 20}
TWO = [
    CudaDevice(0, uuid_of(0), "Fake H100", 0),
    CudaDevice(1, uuid_of(1), "Fake H100", 0, unavailable=Unavailable(Obstacle.IN_USE, "process 7 of alice is on it")),
]


def config(*overrides: str) -> Config:
    return resolve_config(None, list(overrides)).config


def recorded() -> Snapshot:
    return Snapshot.from_line(RECORDING.read_text().splitlines()[0])


def idle() -> Gpu:
    """The first of the recorded GPUs, with nobody on it."""
    one = recorded().gpus[0]
    nothing = {"throttle": replace(one["throttle"], value=[]), "memory_used": replace(one["memory_used"], value=0)}
    return replace(one, readings=dict(one.readings) | nothing, processes=replace(one.processes, value=()), runs=())


def held_by(user: str, uuid: str | None) -> ReservationInfo:
    return ReservationInfo("big", user, 1, 0.0, "all", (), (uuid or "",), ())


def stub(folder: Path, package: str, program: str) -> str:
    """A PYTHONPATH under which a package is another."""
    (folder / "stub" / package).mkdir(parents=True)
    (folder / "stub" / package / "__init__.py").write_text(program)
    return os.pathsep.join([str(folder / "stub"), os.environ.get("PYTHONPATH", "")])


# ---- The command ----


def test_a_machine_without_gpus_is_well_and_its_ranks_reach_each_other(gputrain: Gputrain) -> None:
    done = gputrain("doctor", "digits", "--json", "device.ranks=2")
    assert done.returncode == 0, done.stdout
    told = json.loads(done.stdout)
    assert told["format"] == 1
    checks = {check["name"]: check for check in told["checks"]}
    assert {check["area"] for check in told["checks"]} == {"machine", "GPUs", "torch", "run"}
    assert all(set(check) == {"area", "name", "state", "found", "advice"} for check in told["checks"])
    assert checks["driver"]["found"].endswith("runs train on the CPU")
    assert "imports together with torchvision" in checks["torch"]["found"]
    assert checks["devices"]["found"] == "2 ranks on the CPU"
    assert checks["all-reduce"]["state"] == "ok"
    assert checks["all-reduce"]["found"].startswith("64 MiB between 2 ranks on the CPU with gloo: ")


def test_eight_gpus_in_trouble_and_a_broken_torch_fit_80_columns(gputrain: Gputrain, host: GpuHost) -> None:
    other = {"user": NOBODY} if os.getuid() == 0 else {}
    sleeper = gputrain.start("/bin/sleep", "100", **other)
    pid = sleeper.pid if other else 1
    host.becomes(
        [gpu(index, throttle=0x20) for index in range(3)],
        [gpu(3), gpu(4, uncorrected=2), gpu(5), gpu(6), gpu(7)],
        [f"process 3 {pid} 500 compute", f"process 5 {PHANTOM} 500 compute", f"process 6 {os.getpid()} 9 compute"],
        "fault 7 * 15",
    )
    path = stub(gputrain.folder, "torch", "raise RuntimeError('operator torchvision::nms does not exist')")
    path = os.pathsep.join([path, host.environment.get("PYTHONPATH", "")])
    variables = gputrain.environment | host.environment | {"PYTHONPATH": path, "COLUMNS": "80"}
    del variables["CUDA_VISIBLE_DEVICES"]
    process = gputrain.start("doctor", env=variables)
    shown, messages = process.communicate(timeout=60)
    assert process.returncode == 1
    assert max(map(cell_len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    words = " ".join(shown.split())
    assert "warning GPU 0-2 its clocks are held down: thermal → it is too hot: look at fans and air flow" in words
    user = psutil.Process(pid).username()
    assert f"warning GPU 3 process {pid} of {user} computes on it" in words
    assert f"wait for it (--wait), or ask {user}" in words
    assert "problem GPU 4 2 ECC errors that could not be corrected" in words
    assert f"warning GPU 5 process {PHANTOM} computes on it (no such process here" in words
    assert f"if it is a leftover of yours, end it: `kill {os.getpid()}`" in words
    assert "problem GPU 7 it is lost" in words
    assert "problem torch torch does not import" in words
    assert "RuntimeError: operator torchvision::nms does not exist → install both from one index" in words
    assert "unknown all-reduce not tried: torch does not work" in words
    assert messages == "3 problems, 6 warnings.\n"


def test_what_hangs_is_told_and_holds_up_nothing(
    host: GpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if COMPILER is None:
        pytest.skip(NO_COMPILER)
    load_here(host.driver)
    host.becomes(gpu(0), "fault * nvmlInitWithFlags hang")
    for name, value in host.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "torch", "import time; time.sleep(1000)"))
    monkeypatch.setattr(examining, "DRIVER_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(examining, "IMPORT_TIMEOUT_SECONDS", 1.0)
    before = set(psutil.Process().children(recursive=True))
    areas = examining.examine(config(), tmp_path)
    assert [check.area for check in next(areas)][:3] == ["machine"] * 3
    [driver], torch, run = areas
    assert (driver.state, "answer" in driver.found) == ("problem", True)
    assert (torch[-1].state, "no answer within 1 s" in torch[-1].found) == ("problem", True)
    assert (run[-1].name, run[-1].state) == ("all-reduce", "unknown")
    wait_for(lambda: set(psutil.Process().children(recursive=True)) <= before, "the end of what hung", 15)


def test_a_doctor_that_is_killed_takes_the_ranks_of_its_all_reduce_along(gputrain: Gputrain) -> None:
    path = stub(gputrain.folder, "torchvision", "raise ImportError('none of it is needed here')")
    variables = gputrain.environment | {"PYTHONPATH": path}
    process = gputrain.start("doctor", "--json", "device.ranks=4", env=variables)
    wait_for(lambda: len(gputrain.processes()) >= 6, "the ranks")
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: not gputrain.processes(), "the end of all", 15)


def test_bad_usage_is_refused_before_anything_is_looked_at(gputrain: Gputrain) -> None:
    done = gputrain("doctor", "data.batch_sze=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: data.batch_sze: there is no such key; did you mean data.batch_size?\n"


# ---- The machine ----


def test_little_memory_is_a_warning() -> None:
    assert memory_check(2 << 30, 8 << 30) == Check("machine", "memory", "ok", "2 GiB of 8 GiB free")
    assert memory_check(512 << 20, 8 << 30).state == "warning"


def test_a_runs_folder_that_cannot_be_one_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert runs_folder_check(tmp_path / "not" / "there" / "yet").state == "ok"
    check = runs_folder_check(tmp_path / "file" / "runs")
    assert (check.state, check.advice) == ("problem", "let runs lie elsewhere: --runs-dir or GPUTRAIN_RUNS")


def test_forgotten_variables_that_slow_runs_down_are_named() -> None:
    [check] = environment_checks({"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "0"})
    assert check.found == "CUDA_LAUNCH_BLOCKING=1 makes every step wait for every kernel"


# ---- The GPUs ----


def test_a_card_without_a_driver_is_a_problem_and_no_card_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x1002", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(doctor_gpus, "PCI_DEVICES", tmp_path)
    assert count_nvidia_cards() == 1
    assert no_driver_check("no library", 0).state == "ok"
    check = no_driver_check("no library", 1)
    assert (check.state, check.found) == ("problem", "no library, and there is 1 NVIDIA card in this machine")


def test_a_recording_is_never_taken_for_the_gpus() -> None:
    assert driver_check(recorded()).state == "warning"
    assert driver_check(None).state == "problem"


def test_a_gpu_that_is_silent_is_a_problem_and_one_that_idles_is_free() -> None:
    [check] = gpu_checks([idle().as_stale(4.0)], [])
    assert (check.state, check.found) == ("problem", "it has not answered for 4 s")
    [check] = gpu_checks([idle()], [])
    assert (check.state, check.found) == ("ok", "NVIDIA H100 80GB HBM3, free")


def test_a_run_of_ones_own_is_well_and_anothers_is_a_warning() -> None:
    one = idle()
    [check] = gpu_checks([one], [held_by(user_name(), one.uuid)])
    assert (check.state, check.found) == ("ok", f"the run big of {user_name()} has it")
    [check] = gpu_checks([one], [held_by("alice", one.uuid)])
    assert (check.state, check.found) == ("warning", "the run big of alice has it")


def test_hidden_gpus_are_told_of() -> None:
    [check] = visible_devices_check({"CUDA_VISIBLE_DEVICES": "1"}, 8, 1)
    assert check.found == "CUDA_VISIBLE_DEVICES='1' shows 1 of 8 GPUs"
    assert not list(visible_devices_check({}, 8, 8))


# ---- torch and its fit ----


@pytest.mark.parametrize(
    ("built", "served", "error", "state"),
    [
        ("12.8", "12.4", None, "ok"),
        ("12.8", "13.0", None, "ok"),
        ("13.0", "12.8", None, "problem"),
        ("12.8", "12.8", "RuntimeError: no devices", "problem"),
        ("12.8", None, None, "ok"),
    ],
)
def test_a_driver_serves_its_own_major_version_of_cuda_and_those_before(
    built: str, served: str | None, error: str | None, state: str
) -> None:
    assert cuda_check(built, served, error).state == state


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120a"], False),
    ],
)
def test_which_gpus_torch_has_code_for(capability: tuple[int, int], kernels: list[str], runs: bool) -> None:
    assert supports_capability(capability, kernels) is runs
    checks = list(arch_checks([{"name": "X", "capability": list(capability)}], kernels))
    assert [check.state for check in checks] == ([] if runs else ["problem"])


def test_torch_and_torchvision_that_do_not_go_together_are_a_problem() -> None:
    told = {"torch": "2.15.0+cpu", "gloo": True, "errors": {"torchvision": "RuntimeError: operator does not exist"}}
    [check] = torch_checks(told)
    assert check.state == "problem"
    assert "pip install --force-reinstall torch torchvision" in check.advice


# ---- The run ----


def test_what_the_selection_comes_to() -> None:
    check, chosen = device_check(config("device.gpus=auto"), TWO)
    assert (check.state, check.found, chosen) == ("ok", "auto comes to GPU 0", TWO[:1])
    check, chosen = device_check(config("device.gpus=all"), TWO)
    assert (check.state, chosen) == ("warning", TWO)
    check, chosen = device_check(config("device.gpus=free:2"), TWO)
    assert (check.state, check.found) == ("problem", "2 free GPUs wanted, 1 there: GPU 1: process 7 of alice is on it")
    check, chosen = device_check(config("device.gpus=all"), [])
    assert (check.found, check.advice) == ("all, but there is no GPU here", "train on the CPU with --gpus cpu")
    check, chosen = device_check(config("device.gpus=7"), TWO)
    assert check.found == "there is no GPU '7'"
    assert check.advice.startswith("there are 0 (Fake H100")
    check, chosen = device_check(config("device.gpus=cpu", "device.backend=nccl"), [])
    assert (check.found, check.advice) == ("nccl joins GPUs, and this run is on the CPU", "give gloo or auto")
    check, chosen = device_check(config("device.gpus=auto"), TWO[1:])
    assert (check.state, chosen) == ("warning", [])


def test_where_the_data_is_missing_the_advice_is_apart(tmp_path: Path) -> None:
    gone = tmp_path / "a; b"
    folder = data_check(config("data.dataset=folder", f"data.path={gone}"))
    assert folder is not None
    assert (folder.found, folder.advice) == (
        f"{gone} does not exist or is no folder",
        "give the folder of the data",
    )
    mnist = data_check(config("data.dataset=mnist", f"data.path={gone}"))
    assert mnist is not None
    assert mnist.found.startswith(f"no mnist in {gone}: ")
    assert mnist.found.endswith(" is missing")
    assert mnist.advice == "give the folder that holds MNIST/raw, or fetch it with data.download=true"


def test_an_all_reduce_is_between_the_chosen_gpus_or_two_ranks_at_least() -> None:
    assert all_reduce_devices(config(), TWO) == [uuid_of(0), uuid_of(1)]
    assert all_reduce_devices(config(), []) == ["cpu", "cpu"]
    assert all_reduce_devices(config("device.ranks=3"), []) == ["cpu"] * 3


def test_the_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_bandwidth(2, 1000, 1.0) == 1000
    assert bus_bandwidth(4, 1000, 0.5) == 3000


def test_what_may_come_of_an_all_reduce() -> None:
    gpus = [uuid_of(0), uuid_of(1)]
    fast = all_reduce_check(gpus, OUTCOME)
    assert (fast.state, fast.found) == ("ok", "64 MiB between 2 GPUs with NCCL: 67.1 GB/s on the bus")
    assert all_reduce_check(gpus, OUTCOME | {"seconds": 1.0}).state == "warning"
    assert all_reduce_check(["cpu", "cpu"], OUTCOME | {"seconds": 1.0}).state == "ok"
    assert "gave a wrong sum" in all_reduce_check(gpus, OUTCOME | {"right": False}).found
    failed = all_reduce_check(gpus, {"error": "no answer within 60 s"})
    assert (failed.state, "NCCL_P2P_DISABLE=1" in failed.advice) == ("problem", True)
    assert "nothing to reduce" in all_reduce_check(gpus[:1], OUTCOME).found


def test_the_same_of_several_gpus_is_said_once() -> None:
    checks = [Check("GPUs", f"GPU {index}", "ok", "free", gpu=index) for index in (0, 1, 2, 5)]
    other = Check("GPUs", "GPU 3", "warning", "hot", gpu=3)
    assert [check.name for check in merge_gpus([*checks, other])] == ["GPU 0-2,5", "GPU 3"]
    assert other.to_dict() == {"area": "GPUs", "name": "GPU 3", "state": "warning", "found": "hot", "advice": ""}
