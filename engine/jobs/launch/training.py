"""Start a training whose ranks this process supervises: preflight, GPUs, run folder, ranks. `launcher` calls it.

A learning rate range test (`run_lr_find`) takes the path of a dry run. `tui.cli.lr_find` calls it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.base.errors import raise_if_any
from engine.config.effects import section_keys
from engine.config.run_sections import CheckpointConfig
from engine.config.schema import Config
from engine.config.training_sections import ScheduleConfig
from engine.gpus.selection import CudaDevice
from engine.jobs.launch.launcher import launch
from engine.jobs.launch.phases import Ended, Granted, Recording, Requested, Unrecorded, grant, record, show_warnings
from engine.jobs.launch.preflight import Preflight, find_problems, run_preflight, source_opener
from engine.jobs.launch.rank_starter import RankStarter
from engine.jobs.launch.ranks import Ranks
from engine.jobs.launch.request import RunRequest, SettledConfig
from engine.jobs.launch.run_code import copied_folder
from engine.jobs.launch.supervise import supervise
from engine.runs.events import Event, StepEvent
from engine.runs.recorder import Listener
from engine.train.loop.job import Job
from engine.train.optim.lr_range import LossCurve, LrRange


def run_training(requested: Requested) -> Ended:
    """Train to the end. Raises UsageError if the request is refused, and as `phases` does."""
    request, starters = requested.request, _start_starters(requested)
    if request.config.waits:
        # Whoever started it may be gone when it has its GPUs.
        raise_if_any(find_problems(request))
    grants: list[Granted] = []

    def choose_gpus(wait: bool) -> Sequence[CudaDevice]:
        grants.append(grant(requested, wait=wait))
        return grants[-1].allocation.devices

    def after_wait(config: Config) -> Config:
        queued = grants[-1].queued
        place = None if queued is None else copied_folder(queued.claimed.code, queued.claimed.folder)
        return config if place is None else config.with_values(run={"code": str(place)})

    open_source = source_opener(requested.listener)
    preflight = run_preflight(request, choose_gpus, open_source=open_source, after_wait=after_wait)
    raise_if_any(preflight.problems)
    run = begin_training(grants[-1], preflight)
    return supervise(run, Ranks(run, make_job(run, preflight), starters))


def begin_training(granted: Granted, preflight: Preflight) -> Unrecorded:
    """Begin a training that nothing refuses; a dry run is not recorded. Raises UsageError and AlreadyFinishedError."""
    requested = granted.requested
    config = preflight.chosen(requested.request.config)
    if requested.request.dry_run:
        show_warnings(requested, preflight.warnings)
        return Unrecorded(granted, SettledConfig(config, config))
    run = record(granted, config, preflight.warnings)
    run.check_code()
    return run


def _start_starters(requested: Requested) -> Iterator[RankStarter]:
    """Yield a rank starter per start of the ranks. The first one may already be importing torch."""

    def start() -> RankStarter:
        starter = RankStarter()
        requested.held.processes.callback(starter.kill)
        return starter

    # A run that may wait for GPUs for days must not hold that memory.
    request = requested.request
    first = [] if request.config.waits or request.problems else [start()]

    def starters() -> Iterator[RankStarter]:
        yield from first
        while True:
            yield start()

    return starters()


def make_job(run: Unrecorded, preflight: Preflight) -> Job:
    """Return the job of the ranks of a run that has begun."""
    request = run.granted.requested.request
    folder, is_resumed = (run.folder, run.is_resumed) if isinstance(run, Recording) else (None, False)
    return Job(
        run.settled.used,
        preflight.accepted_plan,
        folder,
        is_resumed,
        preflight.source,
        lr_range=request.lr_range,
        input_source=request.input_source,
        amp_reason=preflight.amp.reason,
    )


UNUSED_KEYS = {
    **dict.fromkeys(
        ("run.name", "run.resume", "run.requeue", "run.max_restarts", "queue.after", *section_keys("checkpoint")),
        "in a learning rate test, which is no run",
    ),
    **dict.fromkeys(
        (
            *("run.epochs", "run.monitor", "run.monitor_mode", "run.early_stop", "run.early_stop_min_delta"),
            *("run.log_every", "model.ema", "optim.lr"),
        ),
        "in a learning rate test, which has its own steps and learning rates",
    ),
    **dict.fromkeys(section_keys("schedule"), "in a learning rate test, which has its own learning rates"),
}
"""Config keys that a test does not use, and the reason."""


def range_test_request(request: RunRequest, lr_range: LrRange) -> RunRequest:
    """Return the request of a range test for that of a run.

    Its config lacks what must not affect the test: name and resume of the run, EMA, schedule and checkpoints."""
    run = {"name": None, "resume": False, "requeue": False, "max_restarts": 0, "log_every": 1}
    config = request.config.with_values(run=run, model={"ema": 0.0})
    update = {"schedule": ScheduleConfig(), "checkpoint": CheckpointConfig(every_minutes=0)}
    return replace(request, config=config.model_copy(update=update), dry_run=True, lr_range=lr_range)


def run_lr_find(
    request: RunRequest, lr_range: LrRange, on_step: Callable[[LossCurve], None], listener: Listener
) -> tuple[int, LossCurve]:
    """Run the range test of a request to its end; return the exit code of its ranks, and the curve of the losses.

    `on_step` receives the curve after each step, `listener` all other events. Under torchrun and srun, only rank 0 has
    a curve. Raises UsageError if the range or the request is refused, with nothing left behind."""
    lr_range.check()
    curve = LossCurve(lr_range)

    def receive(event: Event) -> None:
        if not isinstance(event, StepEvent):
            listener(event)
            return
        for loss in event.losses:
            # A loss that is not finite is null between the processes.
            curve.add(math.inf if loss is None or not math.isfinite(loss) else loss)
            on_step(curve)

    return launch(range_test_request(request, lr_range), receive), curve
