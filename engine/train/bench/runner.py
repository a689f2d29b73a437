"""Scaling benchmark: trains the same config on different numbers of ranks and measures the throughput.

Each measurement is a `gputrain run` in a temporary folder; `report` reads its journal. Called by `gputrain bench`.

An epoch covers the same images for any number of ranks, and the batch size per rank is constant.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import Problem, UsageError
from engine.base.exits import exit_status
from engine.base.files import replace_file
from engine.base.host import MAX_RANKS_PER_CORE, available_cores
from engine.base.process import die_with_parent
from engine.config.effects import section_keys
from engine.config.schema import Config, as_stored
from engine.config.training_sections import ScheduleConfig
from engine.config.yaml_io import to_yaml
from engine.gpus.allocation import allocate_devices
from engine.gpus.selection import why_not_free
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.train.bench.report import MIN_EPOCHS, Speed, measure

NO_CHECKPOINT_EPOCHS = 10**9  # checkpoint.every_epochs beyond any benchmark
LR_FACTOR = 0.01  # of optim.lr, see `bench_run_config`
TEMP_FOLDER_PREFIX = "gputrain-bench-"
# Values of each measured run. The best and the last checkpoint are still saved, outside of the measured time.
FIXED_VALUES: dict[str, dict[str, Any]] = {
    "run": {"resume": False, "requeue": False, "max_restarts": 0},
    "device": {"launcher": "spawn"},
    "checkpoint": {"keep": 1, "every_epochs": NO_CHECKPOINT_EPOCHS, "every_steps": 0, "every_minutes": 0.0},
}
UNUSED_KEYS = {
    **{f"{section}.{key}": "in a benchmark" for section, values in FIXED_VALUES.items() for key in values},
    **dict.fromkeys(("run.name", "queue.after", "queue.begin", *section_keys("schedule")), "in a benchmark"),
    "device.ranks": "in a benchmark, which measures the rank counts of --ranks-list",
}
"""Config keys that a benchmark does not use, and the reason."""


@dataclass(frozen=True)
class BenchPlan:
    """What to measure. `gpus` are the UUIDs of the GPUs that runs use in this order; without any they use the CPU."""

    config: Config
    rank_counts: tuple[int, ...]
    epochs: int
    gpus: tuple[str, ...] = ()
    cpu_fallback: Problem | None = None
    """Why it measures the CPU although this host has GPUs."""


def plan_bench(config: Config, rank_counts: Sequence[int], epochs: int, *, on_wait: Callable[[str], None]) -> BenchPlan:
    """Plan a benchmark on the free GPUs of `device.gpus`, or on the CPU. `on_wait` is that of `allocate_devices`.

    `rank_counts` defaults to powers of two up to the number of GPUs or cores, and that number. Raises UsageError if no
    GPU is free, or if the rank counts or epochs cannot be measured.
    """
    allocation = allocate_devices(config.device.gpus, "bench", wait=config.device.wait, on_wait=on_wait)
    # Each run of the benchmark reserves its own GPUs.
    allocation.reservation.release()
    free = tuple(device.uuid for device in allocation.devices if device.is_free)
    if allocation.devices and not free:
        raise UsageError.one("device.gpus", f"no GPU is free: {why_not_free(allocation.devices)}", code="gpu-in-use")
    max_ranks = len(free) or MAX_RANKS_PER_CORE * available_cores()
    if rejected := [count for count in rank_counts if not 1 <= count <= max_ranks]:
        limited_by = ", one per free GPU" if free else f" on {available_cores()} cores"
        reason = f"{rejected[0]} ranks cannot be measured: must be 1 to {max_ranks}{limited_by}"
        raise UsageError.one("--ranks-list", reason, code="out-of-range")
    if epochs < MIN_EPOCHS:
        reason = f"{epochs} is too few: the first epoch is excluded as warmup; set run.epochs to 2 or more"
        raise UsageError.one("run.epochs", reason, code="too-small")
    chosen = tuple(sorted(set(rank_counts))) or default_rank_counts(len(free) or available_cores())
    return BenchPlan(config, chosen, epochs, free, allocation.cpu_fallback)


def default_rank_counts(max_ranks: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and `max_ranks`."""
    return tuple(sorted({max_ranks, *(2**power for power in range(max_ranks.bit_length()) if 2**power <= max_ranks)}))


def cpu_affinity_for(bench: BenchPlan, ranks: int) -> list[int]:
    """Return the CPU cores to which a run of `ranks` ranks is pinned.

    On the CPU every rank gets the same number of cores in all runs. A single rank would otherwise use all cores, and
    more ranks could not be faster.
    """
    allowed = sorted(os.sched_getaffinity(0))
    return allowed if bench.gpus else allowed[: ranks * max(1, available_cores() // max(bench.rank_counts))]


def bench_run_config(bench: BenchPlan, ranks: int, name: str) -> Config:
    """Return the config of one run: the same workload, without resuming, restarts, LR schedule and checkpoints.

    The learning rate is scaled by LR_FACTOR, so that the loss stays finite without warmup and schedule.
    """
    config = bench.config
    changes: dict[str, dict[str, Any]] = {
        "run": {"name": name, "epochs": bench.epochs},
        "device": {"gpus": ",".join(bench.gpus[:ranks]) or "cpu", "ranks": ranks},
        "optim": {"lr": config.optim.lr * LR_FACTOR},
    }
    return config.with_values(**FIXED_VALUES).with_values(**changes).model_copy(update={"schedule": ScheduleConfig()})


def run_bench(bench: BenchPlan, command: Sequence[str], flags: Sequence[str] = ()) -> Iterator[Speed]:
    """Run the benchmark and yield how fast each number of ranks trains.

    `command` is the gputrain command line, `flags` are flags of its `run`. Run folders are removed after each run, and
    the current run is ended if the generator is closed. SIGTERM and SIGHUP raise KeyboardInterrupt from then on.
    """
    # No file can set the packages.
    packages = f"run.code_packages=[{','.join(bench.config.run.code_packages)}]"
    runs = [*command, "run", "--headless", *flags, packages]
    # The run and the temporary files are removed on SIGTERM and SIGHUP too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix=TEMP_FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
        for ranks in bench.rank_counts:
            yield _run_once(bench, ranks, Path(folder), runs)


def _run_once(bench: BenchPlan, ranks: int, folder: Path, command: Sequence[str]) -> Speed:
    name = f"ranks-{ranks}"
    config_file = folder / f"{name}.yaml"
    text = to_yaml(as_stored(bench_run_config(bench, ranks, name)))
    replace_file(config_file, lambda file: file.write(text.encode()))
    run_folder, parent_pid, cores = RunFolder(folder / name), os.getpid(), cpu_affinity_for(bench, ranks)

    def prepare() -> None:
        die_with_parent(parent_pid)
        os.sched_setaffinity(0, cores)

    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            [*command, str(config_file), "--runs-dir", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
        )
        try:
            exit_code = process.wait()
        finally:
            # Its ranks die with it.
            process.kill()
            process.wait()
        output.seek(0)
        output_lines = output.read().decode(errors="replace").splitlines()
    history = run_folder.history()
    shutil.rmtree(run_folder.path, ignore_errors=True)
    return Speed(ranks, failure_message(history, output_lines, exit_code)) if exit_code else measure(history, ranks)


def failure_message(history: History, output_lines: Sequence[str], exit_code: int) -> str:
    """Return why a run failed, in one line: from the journal, else from its output, else the exit code."""
    if history.finished is not None and history.finished.message:
        return history.finished.message
    errors = [line.removeprefix("error: ") for line in output_lines if line.startswith("error: ")]
    silent_exit = f"it {exit_status(exit_code)} and printed nothing; run this config with `gputrain run` to see why"
    return "; ".join(errors) or next((line for line in reversed(output_lines) if line.strip()), silent_exit)
