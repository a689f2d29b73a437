"""Run folders of commands, as their owners write them, without a process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.jobs.command.metric_files import OUTPUT_FILE
from engine.jobs.command.run_metrics import MetricsFinder
from engine.jobs.command.spec import write_command
from engine.runs.curves import CurveReader
from engine.runs.events import Event, GpuEvent, RunFinished
from engine.runs.folder import RunFolder
from engine.runs.foreign_record import with_metrics
from engine.runs.record_completion import read_journal_record
from engine.runs.records import GpuSample, RankDevice
from engine.runs.run_record import write_summary
from support.runs.command_owner import make_command
from support.runs.event_factories import make_command_started
from support.runs.factories import make_run_folder

COMMAND = "torchrun --nproc-per-node 2 train.py --lr 0.1 --hidden 64"
STARTED_AGO = 3000.0


def make_command_run(
    root: Path,
    name: str,
    *events: Event,
    now: float,
    command: str = COMMAND,
    devices: Sequence[str] = (),
    parameters: dict[str, Any] | None = None,
    rows: Sequence[dict[str, float]] = (),
    log: str = "",
) -> RunFolder:
    """Make the run of a command that started `STARTED_AGO` seconds before `now`; `rows` are found in its output."""
    cwd = root.absolute().parent
    began, host = now - STARTED_AGO, "a-host"
    ranks = [RankDevice(0, host, 4200, device, "NVIDIA H200", index) for index, device in enumerate(devices)]
    started = make_command_started(
        began,
        name=name,
        host=host,
        command=command,
        cwd=str(cwd),
        devices=list(devices) or ["cpu"],
        ranks=ranks or [RankDevice(0, host, 4200, "cpu")],
        parameters={"lr": 0.1, "hidden": 64} if parameters is None else parameters,
    )
    folder = make_run_folder(root, name, started, *events)
    folder.config.write_text("{}\n")
    write_command(folder, make_command(cwd, *command.split()))
    folder.log.write_text(log)
    folder.metrics.mkdir()
    if rows:
        text = "".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows))
        (folder.metrics / OUTPUT_FILE).write_text(text)
    _write_record(folder)
    return folder


def _write_record(folder: RunFolder) -> None:
    reader = CurveReader(MetricsFinder(folder).find())
    while reader.read_slice():
        pass
    values = {name: reader.curves.extremes(name) for name in reader.curves.names}
    write_summary(folder.summary, with_metrics(read_journal_record(folder).record, values))


def make_gpu_event(time: float, *devices: str) -> GpuEvent:
    samples = [
        GpuSample(uuid, "a-host", "ok", util=90 - 5 * index, memory_used=60 << 30, temperature=61, power=540)
        for index, uuid in enumerate(devices)
    ]
    return GpuEvent(time=time, gpus=samples)


def make_command_failed(time: float, message: str) -> RunFinished:
    return RunFinished(time=time, state="failed", message=message, exit_code=1)


def make_command_finished(time: float) -> RunFinished:
    return RunFinished(time=time, state="finished", message="loss 0.1", exit_code=0)
