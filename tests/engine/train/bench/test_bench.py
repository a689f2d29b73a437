"""Scaling benchmark: its plan, the config of its runs, their failures, and the cleanup."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.base.host import available_cores
from engine.config.loader import validate_config
from engine.config.run_sections import DeviceConfig
from engine.config.run_sections import RunConfig as RunSection
from engine.config.schema import Config, as_dict
from engine.config.training_sections import ScheduleConfig
from engine.gpus.allocation import GpuAllocation
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.selection import CudaDevice as Gpu
from engine.runs.events import RunFinished
from engine.runs.history import History, history_from_events
from engine.train.bench import runner
from engine.train.bench.report import Speed
from engine.train.bench.runner import (
    BenchPlan,
    bench_run_config,
    cpu_affinity_for,
    failure_message,
    plan_bench,
)
from support.gputrain_command import Gputrain, wait_for
from support.messages import raises_problem, says
from tui.cli.main import app


def make_plan(**keys: Any) -> BenchPlan:
    options: dict[str, Any] = {"config": Config(), "rank_counts": (1, 2), "epochs": 3}
    return BenchPlan(**options | keys)


def make_gpu(index: int, in_use_by: str | None = None) -> Gpu:
    unavailable = None if in_use_by is None else Unavailable(Obstacle.IN_USE, in_use_by)
    return Gpu(index, f"GPU-{index}", "H100", 0, unavailable=unavailable)


def allocate_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    monkeypatch.setattr(runner, "allocate_devices", lambda *_, **__: GpuAllocation(list(gpus)))


def test_failure_message_uses_journal_or_stderr() -> None:
    failed = history_from_events([RunFinished(state="failed", message="rank 1 (cpu) failed: no memory")])
    assert failure_message(failed, ["noise"], 1) == "rank 1 (cpu) failed: no memory"
    output_lines = ["error: data.path: is no folder", "error: optim.lr: is too high", ""]
    assert failure_message(History(), output_lines, 2) == "data.path: is no folder; optim.lr: is too high"
    assert failure_message(History(), ["Traceback", "ImportError: no libgomp", " "], 1) == "ImportError: no libgomp"
    silent = failure_message(History(), [], -9)
    assert "SIGKILL" in silent and "`gputrain run`" in silent


@pytest.mark.parametrize(
    ("keys", "code", "location", "values"),
    [
        ({"rank_counts": [1], "epochs": 1}, "too-small", "run.epochs", ["1"]),
        ({"rank_counts": [0]}, "out-of-range", "--ranks-list", ["0 ranks"]),
        (
            {"rank_counts": [1, 4 * available_cores() + 1]},
            *("out-of-range", "--ranks-list"),
            [f"{4 * available_cores() + 1} ranks", f"1 to {4 * available_cores()} "],
        ),
    ],
    ids=str,
)
def test_plan_bench_rejects_unmeasurable_counts(
    keys: dict[str, Any], code: str, location: str, values: list[str]
) -> None:
    config = Config(device=DeviceConfig(gpus="cpu"))
    with raises_problem(code, location, *values):
        plan_bench(**{"config": config, "epochs": 3, "on_wait": print} | keys)


def test_plan_bench_uses_only_free_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate_gpus(monkeypatch, make_gpu(0), make_gpu(1, in_use_by="someone computes on it"), make_gpu(2), make_gpu(3))
    planned = plan_bench(Config(device=DeviceConfig(gpus="all")), [], 3, on_wait=print)
    assert planned.rank_counts == (1, 2, 3)
    assert bench_run_config(planned, 2, "x").device.gpus == "GPU-0,GPU-2"
    with raises_problem("out-of-range", "--ranks-list", "4 ranks", "1 to 3", "GPU"):
        plan_bench(Config(device=DeviceConfig(gpus="all")), [4], 3, on_wait=print)


def test_plan_bench_refuses_gpus_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate_gpus(monkeypatch, make_gpu(2, in_use_by="someone computes on it"))
    with raises_problem("gpu-in-use", "device.gpus", "GPU 2: someone computes on it"):
        plan_bench(Config(device=DeviceConfig(gpus="2")), [], 3, on_wait=print)


def test_bench_run_config_resets_settings_unrelated_to_workload() -> None:
    config = Config(
        run=RunSection(name="mine", epochs=90, resume=True, requeue=True, max_restarts=3),
        device=DeviceConfig(launcher="slurm", ranks=7),
        schedule=ScheduleConfig(name="multistep", milestones=(30, 60), warmup_epochs=5),
    )
    bench_config = bench_run_config(make_plan(config=config), 2, "ranks-2-1")
    assert (bench_config.run.name, bench_config.run.epochs, bench_config.run.resume, bench_config.run.requeue) == (
        "ranks-2-1",
        3,
        False,
        False,
    )
    assert (bench_config.device.gpus, bench_config.device.ranks, bench_config.device.launcher) == ("cpu", 2, "spawn")
    assert (bench_config.data.batch_size, bench_config.schedule) == (64, ScheduleConfig())
    assert (bench_config.checkpoint.every_minutes, bench_config.checkpoint.every_steps) == (0, 0)
    assert validate_config(as_dict(bench_config)) == bench_config, "the config that is written for the run is valid"


def test_cpu_affinity_gives_each_rank_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(100, 108)))
    monkeypatch.setattr(runner, "available_cores", lambda: 8)
    shares = {ranks: cpu_affinity_for(make_plan(rank_counts=(1, 2, 4)), ranks) for ranks in (1, 2, 4)}
    assert shares == {1: [100, 101], 2: [100, 101, 102, 103], 4: list(range(100, 108))}
    assert [len(cpu_affinity_for(make_plan(rank_counts=(1, 16)), ranks)) for ranks in (1, 16)] == [1, 8]
    assert len(cpu_affinity_for(make_plan(rank_counts=(1, 2, 4), gpus=("GPU-0",)), 1)) == 8


def test_bench_json_lists_every_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(plan: BenchPlan, ranks: int, *_: Any) -> Speed:
        return Speed(2, "no memory") if ranks == 2 else Speed(ranks, images_per_second=100.0 * ranks)

    monkeypatch.setattr(runner, "_run_once", fake)
    result = CliRunner().invoke(app, ["bench", "digits", "--ranks-list", "4,2,1", "--gpus", "cpu", "--json"])
    assert result.exit_code == 1, "one failed"
    values = json.loads(result.stdout)
    assert (values["format"], values["device"], values["epochs"]) == (1, "cpu", 3)
    assert [speed["speed_up"] for speed in values["speeds"]] == [1, None, 4]
    assert values["speeds"][1]["message"] == "no memory"


TINY = ("data.dataset=fake", "data.fake_train=64", "data.fake_val=16", "data.batch_size=16", "--model", "linear")


def temporary_folders(gputrain: Gputrain) -> list[Path]:
    return list((gputrain.folder / "tmp").glob(f"{runner.TEMP_FOLDER_PREFIX}*"))


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_bench_command_on_signal_stops_its_run(gputrain: Gputrain, number: signal.Signals) -> None:
    process = gputrain.start("bench", *TINY, "--epochs", "100000", "--ranks-list", "2")
    wait_for(lambda: any(folder.glob("ranks-*/events.jsonl") for folder in temporary_folders(gputrain)), "the run")
    time.sleep(1)
    process.send_signal(number)
    assert process.wait(30) == 1
    assert gputrain.processes() == []
    assert temporary_folders(gputrain) == []


def test_bench_warns_of_typed_keys_that_it_does_not_use() -> None:
    typed = ("--resume", "--name", "x", "--ranks", "3", "--launcher", "env", "--after", "a", "checkpoint.keep=4")
    result = CliRunner().invoke(app, ["bench", "digits", "--gpus", "cpu", *typed, "--ranks-list", "99999"])
    assert result.exit_code == 2
    *warnings, error = result.stderr.splitlines()
    assert says(error, "out-of-range", "--ranks-list", "99999")
    assert {line.split()[1].partition("=")[0] for line in warnings if says(line, "no-effect")} == {
        *("run.name", "run.resume", "device.ranks", "device.launcher", "queue.after", "checkpoint.keep")
    }
