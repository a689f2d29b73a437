"""Scaling benchmark: its plan, the config of its runs, the results from their journals, and the cleanup."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.bench import runner
from engine.bench.report import BenchRun, bench_run_from_history, scaling_results
from engine.bench.runner import (
    BenchPlan,
    batch_size_for,
    bench_run_config,
    cpu_affinity_for,
    default_rank_counts,
    failure_message,
    plan_bench,
)
from engine.config.data_sections import DataConfig
from engine.config.loader import validate_config
from engine.config.run_sections import DeviceConfig
from engine.config.run_sections import RunConfig as RunSection
from engine.config.schema import Config, as_dict
from engine.config.training_sections import ScheduleConfig
from engine.gpus.allocation import GpuAllocation
from engine.gpus.selection import CudaDevice as Gpu
from engine.gpus.selection import Obstacle, Unavailable
from engine.runs.events import EpochEvent, RunFinished, RunStarted
from engine.runs.history import History, history_from_events
from engine.utils.errors import UsageError
from engine.utils.host import available_cores
from gputrain_command import Gputrain, wait_for
from tui.cli.bench import app
from tui.text.bench import bench_lines, chart_lines, describe_bench_plan, describe_bench_run


def make_history(*epochs: tuple[float, float], started: float = 105.0) -> History:
    """Journal of a run with these epochs, as pairs of seconds and images/s."""
    return history_from_events(make_events(*epochs, started=started))


def make_events(*epochs: tuple[float, float], started: float = 105.0) -> list[RunStarted | EpochEvent]:
    started_event = RunStarted(
        time=started, name="a", host="h", world_size=2, devices=["cpu"] * 2, backend="gloo", epochs=len(epochs),
        global_batch=64, steps_per_epoch=5, train_images=320, val_images=80, classes=10, parameters=7, workers=0,
        versions={},
    )  # fmt: skip
    metrics = {"train_loss": 1.0, "train_accuracy": 0.5, "val_loss": 1.0, "val_accuracy": 0.5, "lr": 0.1}
    epoch_events = [
        EpochEvent(epoch=number, step=5 * number, seconds=seconds, images_per_second=rate, **metrics)  # type: ignore[arg-type]
        for number, (seconds, rate) in enumerate(epochs, 1)
    ]
    return [started_event, *epoch_events]


def make_run(ranks: int, *rates: float, repeat: int = 1, images: float = 1000) -> BenchRun:
    """A run with a first epoch of 9 s, then one epoch per throughput in `rates`."""
    return BenchRun(
        ranks, repeat, "", 32 * ranks, 4.0 + ranks, ((9.0, 1.0), *((images / rate, rate) for rate in rates))
    )


def make_plan(**keys: Any) -> BenchPlan:
    options: dict[str, Any] = {"config": Config(), "rank_counts": (1, 2), "epochs": 3, "repeats": 1, "strong": False}
    return BenchPlan(**options | {"on_gpu": False} | keys)


def make_gpu(index: int, in_use_by: str | None = None) -> Gpu:
    unavailable = None if in_use_by is None else Unavailable(Obstacle.IN_USE, in_use_by)
    return Gpu(index, f"GPU-{index}", "H100", 0, unavailable=unavailable)


def allocate_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    monkeypatch.setattr(runner, "allocate_devices", lambda *_, **__: GpuAllocation(list(gpus)))


def test_bench_run_reads_epochs_and_startup_time_from_journal() -> None:
    bench_run = bench_run_from_history(
        make_history((9.0, 40.0), (4.0, 80.0), (3.0, 100.0)), ranks=2, repeat=1, launched_at=100.5
    )
    assert bench_run == BenchRun(2, 1, "", 64, 4.5, ((9.0, 40.0), (4.0, 80.0), (3.0, 100.0)))


def test_bench_run_rejects_journal_with_single_epoch() -> None:
    assert "too short" in bench_run_from_history(make_history((9.0, 40.0)), 2, 1, 100.0).message
    assert "too short" in bench_run_from_history(History(), 2, 1, 100.0).message
    # NaN is null in a journal.
    nothing: Any = None
    assert "too short" in bench_run_from_history(make_history((9.0, 40.0), (4.0, nothing)), 2, 1, 100.0).message


def test_scaling_excludes_first_epoch() -> None:
    (speed,) = scaling_results([make_run(1, 100, 200, 400)])
    assert (speed.images_per_second, speed.seconds_per_epoch) == (200, 5.0)
    assert (speed.first_epoch_seconds, speed.startup_seconds) == (9.0, 5.0)
    assert speed.spread == (400 - 100) / 2 / 200


def test_scaling_computes_speedup_and_efficiency_from_throughput() -> None:
    speeds = scaling_results([make_run(4, 300), make_run(1, 100), make_run(2, 180)])
    assert [speed.ranks for speed in speeds] == [1, 2, 4]
    assert [speed.speed_up for speed in speeds] == [1, 1.8, 3]
    assert [speed.efficiency for speed in speeds] == [1, 0.9, 0.75]
    assert [speed.global_batch for speed in speeds] == [32, 64, 128]


def test_scaling_combines_repeats() -> None:
    speeds = scaling_results(
        [make_run(1, 100, 110), make_run(2, 200), make_run(1, 120, 130, repeat=2), make_run(2, 240, repeat=2)]
    )
    assert [speed.images_per_second for speed in speeds] == [115, 220]
    assert speeds[1].spread == pytest.approx(20 / 220)


def make_limit_run(ranks: int, *rates: float, repeat: int = 1) -> BenchRun:
    return replace(make_run(ranks, *rates, repeat=repeat), limit=True)


def test_scaling_compares_each_run_with_its_limit_run() -> None:
    runs = [
        make_run(1, 90, repeat=1),
        make_limit_run(1, 100, repeat=1),
        make_run(1, 30, repeat=2),
        make_limit_run(1, 40, repeat=2),
    ]
    [speed] = scaling_results([*runs, make_run(1, 50, repeat=3), make_limit_run(1, 100, repeat=3)])
    assert speed.images_per_second == 50
    assert speed.limit_images_per_second == 100
    assert speed.limit_share == pytest.approx(0.75), "median of 0.9, 0.75 and 0.5"
    assert speed.spread == pytest.approx((90 - 30) / 2 / 50), "the limit runs do not count"


def test_scaling_without_paired_limit_run_has_no_limit_share() -> None:
    one_rank, two_ranks = scaling_results(
        [make_run(1, 90), make_limit_run(2, 100), make_run(2, 80, repeat=2), BenchRun(2, 1, "no memory", limit=True)]
    )
    assert (one_rank.limit_images_per_second, one_rank.limit_share) == (None, None)
    assert (two_ranks.limit_images_per_second, two_ranks.limit_share) == (100, None)
    assert two_ranks.failures == ["on a fixed batch: no memory"]


def test_limit_share_is_at_most_one() -> None:
    # The fixed pipeline does less work, so more than its throughput is noise.
    runs = [make_run(1, 104), make_limit_run(1, 100), make_run(2, 90, 140), make_limit_run(2, 100)]
    runs += [make_run(4, 203), make_limit_run(4, 100)]
    results = scaling_results(runs)
    assert [result.limit_share for result in results] == [1.0, 1.0, None]
    assert [bool(result.limit_problem) for result in results] == [False, False, True]
    *_, row, message = bench_lines(results)
    assert row.split()[:4] == ["4", "203", "100", "–"]
    assert message.startswith("4 ranks: the share is unknown: training was 2.03 times as fast as without the input")


def test_bench_run_averages_data_wait_and_mfu_without_first_epoch() -> None:
    started_event, *epochs = [
        replace(event, flops=1e9, peak_tflops=1.0) if isinstance(event, RunStarted) else event
        for event in make_events((9.0, 40.0), (4.0, 100.0), (3.0, 300.0))
    ]
    waits = [replace(epoch, data_wait=wait) for epoch, wait in zip(epochs, (0.9, 0.2, 0.4), strict=True)]  # type: ignore[call-arg]
    bench_run = bench_run_from_history(history_from_events([started_event, *waits]), 2, 1, 100.0)
    assert (bench_run.data_wait, bench_run.mfu) == (pytest.approx(0.3), pytest.approx(0.2))
    assert (make_run(1, 100).data_wait, make_run(1, 100).mfu) == (None, None)


def test_bench_table_shows_limit_columns() -> None:
    bench_run = replace(make_run(1, 2510), data_wait=0.34, mfu=0.123)
    lines = list(
        bench_lines(scaling_results([bench_run, make_limit_run(1, 5020), make_run(2, 3000), make_limit_run(2, 6000)]))
    )
    assert [line.split() for line in lines[-3:]] == [
        ["RANKS", "IMAGES/S", "LIMIT", "SHARE", "DATA", "WAIT", "MFU"],
        ["1", "2,510", "5,020", "50%", "34%", "12%"],
        ["2", "3,000", "6,000", "50%", "–", "–"],
    ]
    assert not any("LIMIT" in line for line in bench_lines(scaling_results([bench_run])))


def test_bench_run_config_with_limit_differs_only_in_data_section() -> None:
    config = Config(data=DataConfig(workers=3, prefetch=9, batch_size=48))
    normal, limit = (bench_run_config(make_plan(config=config), 2, "x", limit=limit) for limit in (False, True))
    assert (normal.data.pipeline, normal.data.workers) == ("auto", 3)
    assert limit.model_copy(update={"data": normal.data}) == normal
    assert limit.data == DataConfig(pipeline="fixed", batch_size=48), "it has no DataLoader workers"
    assert validate_config(as_dict(limit)) == limit


def test_bench_pairs_each_run_with_limit_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_runs: list[tuple[int, int, bool]] = []

    def fake(plan: BenchPlan, ranks: int, repeat: int, *_: Any, limit: bool = False) -> BenchRun:
        bench_runs.append((ranks, repeat, limit))
        return make_run(ranks, 200.0 if limit else 150.0, repeat=repeat)

    monkeypatch.setattr(runner, "_run_once", fake)
    arguments = ["digits", "--ranks-list", "1", "--repeats", "2", "--gpus", "cpu", "--limit"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert bench_runs == [(1, 1, False), (1, 1, True), (1, 2, False), (1, 2, True)]
    values = json.loads(result.stdout)
    assert values["limit"] is True
    assert [(speed["limit_images_per_second"], speed["limit_share"]) for speed in values["speeds"]] == [(200, 0.75)]
    assert [values_of_run["limit"] for values_of_run in values["runs"]] == [False, True, False, True]
    assert "4/4  1 rank, without the input pipeline: 5.00 s per epoch, 200 images/s" in result.stderr
    assert "SHARE" in CliRunner().invoke(app, arguments).stdout


def test_scaling_without_single_rank_uses_fewest_ranks_as_baseline() -> None:
    speeds = scaling_results([make_run(2, 200), make_run(4, 300)])
    assert [speed.speed_up for speed in speeds] == [2, 3]
    assert "1 rank was not measured; the speedup of 2 ranks is assumed to be 2." in list(bench_lines(speeds))


def test_scaling_keeps_successful_runs_when_others_fail() -> None:
    speeds = scaling_results(
        [make_run(1, 100), BenchRun(2, 1, "out of memory"), make_run(4, 380), BenchRun(4, 2, "out of luck")]
    )
    assert [speed.speed_up for speed in speeds] == [1, None, 3.8]
    assert [speed.failures for speed in speeds] == [[], ["out of memory"], ["out of luck"]]
    lines = list(bench_lines(speeds))
    assert lines[2].split() == ["2", *["–"] * 8]
    assert lines[-2:] == ["2 ranks failed: out of memory", "4 ranks failed: out of luck"]


def test_failure_message_uses_journal_or_stderr() -> None:
    failed = history_from_events([RunFinished(state="failed", message="rank 1 (cpu) failed: no memory")])
    assert failure_message(failed, ["noise"], 1) == "rank 1 (cpu) failed: no memory"
    output_lines = ["error: data.path: is no folder", "error: optim.lr: is too high", ""]
    assert failure_message(History(), output_lines, 2) == "data.path: is no folder; optim.lr: is too high"
    assert failure_message(History(), ["Traceback", "ImportError: no libgomp", " "], 1) == "ImportError: no libgomp"
    assert failure_message(History(), [], -9).startswith("it was killed by SIGKILL and printed nothing; run ")


@pytest.mark.parametrize(("max_ranks", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_default_rank_counts_double_up_to_maximum(max_ranks: int, counts: tuple[int, ...]) -> None:
    assert default_rank_counts(max_ranks) == counts


def test_batch_size_for_keeps_batch_size_per_rank_or_global_with_strong() -> None:
    config = Config(data=DataConfig(batch_size=48))
    assert [batch_size_for(make_plan(config=config), ranks) for ranks in (1, 2, 4)] == [48, 48, 48]
    assert [batch_size_for(make_plan(config=config, strong=True), ranks) for ranks in (1, 2, 4)] == [48, 24, 12]
    assert batch_size_for(make_plan(config=Config(data=DataConfig(batch_size="auto"))), 2) == "auto"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank_counts": [1, 5], "strong": True}, r"data.batch_size: 64 is not divisible by 5 ranks, as --strong"),
        ({"rank_counts": [1], "epochs": 1}, r"run.epochs: 1 is too few"),
        ({"rank_counts": [0]}, r"--ranks-list: 0 ranks cannot be measured"),
        (
            {"rank_counts": [1, 4 * available_cores() + 1]},
            rf"--ranks-list: {4 * available_cores() + 1} ranks cannot.*must be 1 to {4 * available_cores()} on",
        ),
    ],
    ids=str,
)
def test_plan_bench_rejects_unmeasurable_counts(keys: dict[str, Any], message: str) -> None:
    config = Config(device=DeviceConfig(gpus="cpu"))
    with pytest.raises(UsageError, match=message):
        plan_bench(**{"config": config, "epochs": 3, "repeats": 1, "strong": False, "on_wait": print} | keys)
    with pytest.raises(UsageError, match="auto cannot be combined with --strong"):
        plan_bench(
            config.model_copy(update={"data": DataConfig(batch_size="auto")}), [1], 3, 1, strong=True, on_wait=print
        )


def test_plan_bench_on_cpu_counts_up_to_all_cores() -> None:
    planned = plan_bench(Config(device=DeviceConfig(gpus="cpu")), [], 3, 1, strong=False, on_wait=print)
    assert (planned.rank_counts, planned.on_gpu) == (default_rank_counts(available_cores()), False)


def test_plan_bench_uses_only_free_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate_gpus(monkeypatch, make_gpu(0), make_gpu(1, in_use_by="someone computes on it"), make_gpu(2), make_gpu(3))
    planned = plan_bench(Config(device=DeviceConfig(gpus="all")), [], 3, 1, strong=False, on_wait=print)
    assert (planned.rank_counts, planned.on_gpu) == ((1, 2, 3), True)
    assert bench_run_config(planned, 2, "x").device.gpus == "free:2"
    with pytest.raises(UsageError, match="4 ranks cannot be measured: must be 1 to 3, one per free GPU"):
        plan_bench(Config(device=DeviceConfig(gpus="all")), [4], 3, 1, strong=False, on_wait=print)


def test_plan_bench_passes_on_why_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: Any, on_wait: Callable[[str], None], **__: Any) -> GpuAllocation:
        on_wait("no GPU is free")
        return GpuAllocation()

    monkeypatch.setattr(runner, "allocate_devices", wait)
    reasons: list[str] = []
    plan_bench(Config(), [], 3, 1, strong=False, on_wait=reasons.append)
    assert reasons == ["no GPU is free"]


def test_plan_bench_keeps_order_of_named_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate_gpus(monkeypatch, make_gpu(5), make_gpu(2))
    planned = plan_bench(Config(device=DeviceConfig(gpus="5,2")), [], 3, 1, strong=False, on_wait=print)
    assert [bench_run_config(planned, ranks, "x").device.gpus for ranks in planned.rank_counts] == ["5", "5,2"]
    allocate_gpus(monkeypatch, make_gpu(5), make_gpu(2, in_use_by="someone computes on it"))
    with pytest.raises(UsageError, match="bench uses only free GPUs: GPU 2: someone computes on it"):
        plan_bench(Config(device=DeviceConfig(gpus="5,2")), [], 3, 1, strong=False, on_wait=print)


def test_bench_run_config_resets_settings_unrelated_to_workload() -> None:
    config = Config(
        run=RunSection(name="mine", epochs=90, resume=True, requeue=True, max_restarts=3),
        device=DeviceConfig(launcher="slurm", ranks=7),
        schedule=ScheduleConfig(name="multistep", milestones=(30, 60), warmup_epochs=5),
    )
    bench_config = bench_run_config(make_plan(config=config, strong=True), 2, "ranks-2-1")
    assert (bench_config.run.name, bench_config.run.epochs, bench_config.run.resume, bench_config.run.requeue) == (
        "ranks-2-1",
        3,
        False,
        False,
    )
    assert (bench_config.device.gpus, bench_config.device.ranks, bench_config.device.launcher) == ("cpu", 2, "spawn")
    assert (bench_config.data.batch_size, bench_config.schedule) == (32, ScheduleConfig())
    assert (bench_config.checkpoint.every_minutes, bench_config.checkpoint.every_steps) == (0, 0)
    assert validate_config(as_dict(bench_config)) == bench_config, "the config that is written for the run is valid"


def test_cpu_affinity_gives_each_rank_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(100, 108)))
    monkeypatch.setattr(runner, "available_cores", lambda: 8)
    shares = {ranks: cpu_affinity_for(make_plan(rank_counts=(1, 2, 4)), ranks) for ranks in (1, 2, 4)}
    assert shares == {1: [100, 101], 2: [100, 101, 102, 103], 4: list(range(100, 108))}
    assert [len(cpu_affinity_for(make_plan(rank_counts=(1, 16)), ranks)) for ranks in (1, 16)] == [1, 8]
    assert len(cpu_affinity_for(make_plan(rank_counts=(1, 2, 4), on_gpu=True), 1)) == 8


def test_bench_table_fits_80_columns() -> None:
    speeds = scaling_results([make_run(1, 2510, images=50_000), make_run(64, 123_456, 120_000, images=50_000)])
    lines = list(bench_lines(speeds))
    assert lines[0].split() == [
        *("RANKS", "BATCH", "EPOCH", "IMAGES/S", "SPREAD", "SPEEDUP", "EFFICIENCY", "FIRST", "STARTUP")
    ]
    assert lines[1].split() == ["1", "32", "19.9", "s", "2,510", "–", "1.00", "100%", "9.00", "s", "5.00", "s"]
    assert lines[2].split()[5] == "±1%"
    assert max(map(len, lines)) <= 80


def test_bench_chart_plots_each_rank_count_below_ideal_line() -> None:
    lines = [
        line.plain for line in chart_lines(scaling_results([make_run(1, 100), make_run(2, 150), make_run(4, 200)]), 80)
    ]
    rows = lines[2:-2]
    points = [(row, column) for row, line in enumerate(rows) for column, sign in enumerate(line) if sign == "●"]
    assert len(points) == 3
    assert max(map(len, lines)) <= 80
    # The ideal line ends at the top; the last point is halfway up.
    top = next(row for row, line in enumerate(rows) if line.split("┤")[-1].split("│")[-1].strip())
    assert min(row for row, _ in points) > top + 3
    assert chart_lines(scaling_results([make_run(1, 100)]), 80) == []


def test_bench_messages_describe_plan_and_runs() -> None:
    text = describe_bench_plan(make_plan(rank_counts=(1, 2, 4), repeats=2))
    assert text == "cnn on digits, batch 64 per rank, 3 epochs: 1, 2 and 4 ranks on the CPU, 2 times, interleaved"
    assert describe_bench_run(make_run(2, 100, 200, 400)) == "2 ranks: 5.00 s per epoch, 200 images/s"
    assert describe_bench_run(BenchRun(2, 1, "no\x1b memory")) == "2 ranks: failed: no\\x1b memory"


def test_bench_interleaves_repeats_and_json_lists_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_runs: list[tuple[int, int]] = []

    def fake(plan: BenchPlan, ranks: int, repeat: int, *_: Any) -> BenchRun:
        bench_runs.append((ranks, repeat))
        return (
            BenchRun(2, repeat, "no memory")
            if (ranks, repeat) == (2, 2)
            else make_run(ranks, 100.0 * ranks, repeat=repeat)
        )

    monkeypatch.setattr(runner, "_run_once", fake)
    result = CliRunner().invoke(app, ["digits", "--ranks-list", "2,1", "--repeats", "2", "--gpus", "cpu", "--json"])
    assert bench_runs == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert result.exit_code == 1, "one failed"
    values = json.loads(result.stdout)
    assert (values["format"], values["device"], values["scaling"], values["epochs"]) == (1, "cpu", "weak", 3)
    assert [speed["speed_up"] for speed in values["speeds"]] == [1, 2]
    assert values["runs"][0]["epochs"][1] == {"seconds": 10.0, "images_per_second": 100.0}
    assert values["runs"][3]["message"] == "no memory"


TINY = ("data.dataset=fake", "data.fake_train=64", "data.fake_val=16", "data.batch_size=16", "--model", "linear")


def temporary_folders(gputrain: Gputrain) -> list[Path]:
    return list((gputrain.folder / "tmp").glob(f"{runner.TEMP_FOLDER_PREFIX}*"))


def test_bench_command_trains_and_removes_temporary_files(gputrain: Gputrain) -> None:
    done = gputrain("bench", *TINY, "--epochs", "2", "--ranks-list", "1", "--limit")
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[1].split()
    assert row[:2] == ["1", "16"]
    assert float(row[4].replace(",", "")) > 0
    assert "1/2  1 rank:" in done.stderr
    assert "2/2  1 rank, without the input pipeline:" in done.stderr
    limit = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["1"]][1]
    assert float(limit[2].replace(",", "")) > 0
    # A dash if other load slowed the limit run.
    assert limit[3].endswith(("%", "–"))
    assert temporary_folders(gputrain) == []
    assert not gputrain.runs.exists()


@pytest.mark.soak
def test_bench_command_compares_one_rank_with_two(gputrain: Gputrain) -> None:
    done = gputrain("bench", *TINY, "--epochs", "2", "--ranks-list", "1,2", "--json")
    speeds = json.loads(done.stdout)["speeds"]
    assert [(speed["ranks"], speed["global_batch"], speed["failures"]) for speed in speeds] == [
        (1, 16, []),
        (2, 32, []),
    ]
    assert all(speed["startup_seconds"] > 0 and speed["first_epoch_seconds"] > 0 for speed in speeds)


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
