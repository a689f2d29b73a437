"""Start a training whose ranks this process supervises: preflight, GPUs, run folder, ranks. `launcher` calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.config.schema import Config
from engine.gpus.selection import CudaDevice
from engine.launch.phases import Ended, Granted, Recording, Requested, Unrecorded, grant, record, show_warnings
from engine.launch.preflight import Preflight, find_problems, run_preflight, source_opener
from engine.launch.rank_starter import RankStarter
from engine.launch.ranks import Ranks
from engine.launch.settle import SettledConfig
from engine.launch.supervise import supervise
from engine.training.job import Job
from engine.utils.errors import raise_if_any


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
        place = None if queued is None else queued.claimed.code.copied_folder(queued.claimed.folder)
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
