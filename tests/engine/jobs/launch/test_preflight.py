"""Warnings of the preflight, where a run and `gputrain doctor` show them, and the watch of another host before it."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest

from engine.base.errors import Problem
from engine.base.host import has_bfloat16_instructions
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.gpus import allocation, device_preview, driver
from engine.gpus.selection import CudaDevice, NotFreeError
from engine.jobs.launch import preflight
from engine.jobs.launch import request as run_request
from engine.jobs.launch.phases import Held, Requested, RunListener
from engine.jobs.launch.preflight import Preflight, run_preflight
from engine.jobs.launch.request import RunRequest, watch_other_claim
from engine.jobs.launch.training import run_training
from engine.runs.events import Event, WarningEvent
from engine.runs.folder import list_runs
from engine.train.data.checks import fitting_size
from engine.train.data.inspection_process import ImageCounts
from engine.train.distributed.rank_env import RankInfo
from support.data.photo_folder import write_photo_folder
from support.messages import has_problem, raises_problem
from support.runs.event_factories import make_run_started
from support.runs.factories import make_run_folder
from support.runs.run_owner import Owner


@pytest.fixture(autouse=True)
def cpu_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the kernel that lists what the CPU can do."""
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags : fpu avx512f avx512_bf16 amx_tile\n")
    monkeypatch.setattr("engine.base.host.CPU_INFO", path)
    return path


def preflight_of(folder: Path, *overrides: str, gpus: tuple[CudaDevice, ...] = ()) -> tuple[RunRequest, Preflight]:
    request = RunRequest(resolve_config("digits", ["device.ranks=1", *overrides]).config, folder / "runs", "run")
    return request, run_preflight(request, lambda wait: gpus)


def warnings_of(folder: Path, *overrides: str, gpus: tuple[CudaDevice, ...] = ()) -> list[Problem]:
    return list(preflight_of(folder, *overrides, gpus=gpus)[1].warnings)


@pytest.mark.parametrize(
    ("selection", "overrides", "code", "location"),
    [
        ("free:1", [], "driver-unavailable", "device.gpus"),
        ("cpu", ["data.batch_size=100000"], "too-large", "data.batch_size"),
    ],
)
def test_run_that_waits_is_refused_before_it_has_a_place_in_the_queue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    selection: str,
    overrides: list[str],
    code: str,
    location: str,
) -> None:
    for module in (allocation, device_preview, driver):
        monkeypatch.setattr(module, "has_driver_library", lambda: False)
    settings = [f"device.gpus={selection}", "device.wait=true", "device.ranks=1", *overrides]
    request = RunRequest(resolve_config("digits", settings).config, tmp_path, "run", detached=True)
    with raises_problem(code, location), Held() as held:
        run_training(Requested(request, RunListener(lambda _: None), held))
    assert list_runs(tmp_path) == []


@pytest.mark.parametrize("is_free", [True, False])
def test_rank_of_torchrun_with_device_wait_is_refused_only_if_its_gpus_are_in_use(
    tmp_path: Path, is_free: bool
) -> None:
    def choose_gpus(wait: bool) -> list[CudaDevice]:
        assert not wait
        if not is_free:
            raise NotFreeError.one("device.gpus", "GPU 0 is in use", code="gpu-in-use")
        return []

    request = RunRequest(resolve_config("digits", ["device.wait=true"]).config, tmp_path, "run")
    problems = run_preflight(request, choose_gpus, RankInfo(0, 1, 0, 1)).problems
    assert [problem.code for problem in problems] == ([] if is_free else ["gpu-in-use"])


@pytest.mark.parametrize("level", ["fp16", "O1", "O2", "O3"])
def test_preflight_warns_of_float16_on_cpu(level: str, tmp_path: Path) -> None:
    [warning] = warnings_of(tmp_path, f"precision.amp={level}")
    assert has_problem([warning], "slow-precision", "precision.amp", f": {level} ", "--amp bf16 ", "--amp off")


def test_preflight_advises_against_bfloat16_without_instructions(tmp_path: Path, cpu_info: Path) -> None:
    cpu_info.write_text("flags : fpu avx2 avx512f\n")
    [warning] = warnings_of(tmp_path, "precision.amp=fp16")
    assert has_problem([warning], "slow-precision", "precision.amp", ": fp16 ", "--amp off")
    assert "--amp bf16" not in warning.advice


def test_has_bfloat16_instructions_without_cpu_info(cpu_info: Path) -> None:
    assert has_bfloat16_instructions()
    cpu_info.unlink()
    assert not has_bfloat16_instructions()


def test_preflight_does_not_warn_of_float16_on_gpu(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, "precision.amp=fp16", gpus=(CudaDevice(0, "GPU-0", "H200", None),)) == []


@pytest.mark.parametrize(("capability", "level"), [((9, 0), "bf16"), ((7, 5), "off")])
def test_run_records_precision_that_auto_chose(tmp_path: Path, capability: tuple[int, int], level: str) -> None:
    gpus = (CudaDevice(0, "GPU-0", "H100", None, capability=capability),)
    request, preflight = preflight_of(tmp_path, "precision.amp=auto", gpus=gpus)
    owned = Owner(request)
    with owned.held:
        job = owned.prepare(preflight)
        assert job.folder is not None
        assert job.config.precision.amp == level
        assert resolve_config(str(job.folder.config), ()).config.precision.amp == level


@pytest.mark.parametrize(
    ("overrides", "advised"),
    [
        ((), "=20,"),
        (("data.image_size=224",), None),
        (("data.image_size=40",), None),
    ],
)
def test_preflight_warns_of_images_below_half_of_default_input(
    overrides: tuple[str, ...], advised: str | None, tmp_path: Path
) -> None:
    photos = write_photo_folder(tmp_path / "photos")
    folder = ["data.dataset=folder", f"data.path={photos}", "data.batch_size=4"]
    warnings = warnings_of(tmp_path, *folder, *overrides)
    if advised is None:
        assert warnings == []
    else:
        sizes = ("20 x 20", "224 x 224", f"image_size{advised}")
        assert has_problem(warnings, "images-enlarged", "data.image_size", *sizes)


@pytest.mark.parametrize(("model", "size"), [("cnn", 28), ("my_code:Net", 28), ("resnet18", 32)])
def test_fitting_size_is_multiple_of_32_for_library_models(model: str, size: int) -> None:
    assert fitting_size(Config(model=ModelConfig(name=model)), 28) == size


@pytest.mark.parametrize(("accumulate", "batch_size"), [(1, 12), (3, 4)])
def test_run_reduces_default_batch_size_to_training_images(tmp_path: Path, accumulate: int, batch_size: int) -> None:
    photos = write_photo_folder(tmp_path / "photos")
    folder = [f"data.path={photos}", "data.image_size=20", f"optim.accumulate={accumulate}", "data.dataset=folder"]
    request = RunRequest(resolve_config(None, ["device.ranks=1", *folder]).config, tmp_path / "runs", "run")
    preflight = run_preflight(request, lambda wait: ())
    assert preflight.problems == []
    assert has_problem(preflight.warnings, "too-large", "data.batch_size", " 64 ", f" {batch_size} ", " 12 ")
    owned = Owner(request)
    with owned.held:
        job = owned.prepare(preflight)
        assert job.folder is not None
        assert resolve_config(str(job.folder.config), ()).config.data.batch_size == batch_size


def test_preflight_reduces_default_batch_size_to_user_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[int | str] = []

    def inspect(config: Config, world_size: int) -> ImageCounts:
        tested.append(config.data.batch_size)
        return ImageCounts(12, 4)

    monkeypatch.setattr(preflight, "check_user_data_code", inspect)
    (tmp_path / "own_photos.py").write_text("def photos(part): ...")
    own = ["data.dataset=own_photos:photos", f"run.code={tmp_path}", "data.image_size=20", "device.ranks=1"]
    request = RunRequest(resolve_config(None, own).config, tmp_path / "runs", "run")
    found = run_preflight(request, lambda wait: ())
    assert found.problems == []
    # The helper process refuses a size above the number of images, before the preflight knows that number.
    assert (tested, found.batch_size) == ([1], 12)


def test_preflight_refuses_typed_batch_size_above_training_images(tmp_path: Path) -> None:
    photos = write_photo_folder(tmp_path / "photos")
    folder = ["data.dataset=folder", f"data.path={photos}", "data.image_size=20", "data.batch_size=64"]
    preflight = preflight_of(tmp_path, *folder)[1]
    assert has_problem(preflight.problems, "too-large", "data.batch_size", " 64 ", " 12 ")
    assert preflight.warnings == []


def test_preflight_warns_of_class_without_validation_image(tmp_path: Path) -> None:
    photos = write_photo_folder(tmp_path / "photos")
    (photos / "owl").mkdir()
    shutil.copy(photos / "cat" / "0.png", photos / "owl")
    folder = ["data.dataset=folder", f"data.path={photos}", "data.image_size=20", "data.batch_size=4"]
    [warning] = warnings_of(tmp_path, *folder)
    assert has_problem([warning], "empty-class", "data", " owl")
    assert "cat" not in warning.reason


@pytest.mark.parametrize(
    ("host", "run", "dry_run", "problems", "is_watched"),
    [
        ("node7", {"resume": True}, False, (), True),
        ("node7", {"requeue": True}, False, (), True),
        ("node7", {}, False, (), False),
        ("node7", {"resume": True}, True, (), False),
        ("node7", {"resume": True}, False, (Problem("optim.lr", "is wrong", code="invalid-value"),), False),
        (socket.gethostname(), {"resume": True}, False, (), False),
    ],
)
def test_claim_of_another_host_is_watched_before_a_resume(
    host: str,
    run: dict[str, bool],
    dry_run: bool,
    problems: tuple[Problem, ...],
    is_watched: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    claim = {"format": 1, "host": host, "pid": 7, "heartbeat": time.time(), "write_lock": True}
    folder.owner.write_text(json.dumps(claim))
    watched: list[Path] = []
    monkeypatch.setattr(run_request, "watch_claims", lambda owners, _: watched.extend(owners))
    shown: list[Event] = []
    config = Config.model_validate({"run": {"name": "a"} | run})
    watch_other_claim(RunRequest(config, tmp_path, "a", dry_run, problems=problems), shown.append)
    assert watched == [folder.owner] * is_watched
    assert [isinstance(event, WarningEvent) and event.code for event in shown] == ["already-running"] * is_watched
    assert all("a " in str(event) and "process 7 on node7" in str(event) for event in shown)
