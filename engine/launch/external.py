"""One rank of a world that torchrun or srun started. There is no supervisor: rank 0 owns the run and records it."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.config.schema import Config
from engine.data.sources.open import open_early
from engine.distributed.channel import DirectChannel, StopFlag
from engine.distributed.failures import cause_of, failure_in_words, failure_of
from engine.distributed.node_plan import plan, prepare_environment
from engine.distributed.rank_env import Seat, seat_from_environment
from engine.distributed.rendezvous import check_launched_meeting_point, clear_meeting_point, open_store
from engine.distributed.watchdog import Beats, Marker, Watchdog, standing
from engine.gpus.allocation import Choice
from engine.launch.batch_size import batch_before, find_batch, with_batch
from engine.launch.gpu_usage import UsageWatch, waiting_told
from engine.launch.handshake import await_key, meet, run_of_agents
from engine.launch.lifecycle import Order, close_run, end_run, named, nothing_left, open_recorder, take_folder
from engine.launch.node import NodesUsage, choose_on_host, tell_usage
from engine.runs.control import Asked, take_requests
from engine.runs.event_lines import line_of
from engine.runs.events import BatchFound, Control, Event, RankFailed, RunStarted, Warned
from engine.runs.folder import RunFolder
from engine.runs.ownership import Claim
from engine.runs.recorder import Listener, Recorder
from engine.training.job import Ending, ExitCode, Job
from engine.utils.errors import UsageError
from engine.utils.process import STOPPING, die_with_parent

if TYPE_CHECKING:
    from torch.distributed import Store

WATCH_SECONDS = 0.5
RECORD_SECONDS = 5
HEAR_SECONDS = 60
SAME_FAULT_SECONDS = 5


def join(order: Order, launcher: Literal["env", "slurm"], listener: Listener) -> int:
    """Take this process's seat, train to the end and return the exit code. Raises UsageError on rank 0 only: the others
    leave without a word what it says for all."""
    flag = StopFlag()
    for number in STOPPING:
        signal.signal(number, flag.raise_it)
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    if elastic:
        # Its agent starts the ranks again elsewhere when this one's is gone.
        die_with_parent(os.getppid())
    seat, variables = seat_from_environment(launcher, os.environ)
    os.environ.update(variables)

    method = order.config.device.init_method
    try:
        check_launched_meeting_point(method, os.environ, seat.rank)
    except UsageError as error:
        if seat.rank == 0:
            raise
        print(f"error: rank {seat.rank}: {error}", file=sys.stderr)
        return ExitCode.REFUSED

    import torch.distributed as dist

    try:
        store = open_store(order.config, seat)
    except (RuntimeError, ValueError) as error:
        print(f"rank {seat.rank} did not find the others: {cause_of(error)}", file=sys.stderr)
        return ExitCode.FAILED
    claimed: Claim | None = None
    choice = Choice()
    try:
        world, agents = meet(store, seat, flag)
        store = dist.PrefixStore(world, store)
        choice = choose_on_host(order, seat, store, flag, waiting_told(listener))
        run_plan = plan(order.config, choice.devices, seat.local_world_size)
        prepare_environment(run_plan, os.environ)
        if seat.local_rank == 0:
            for warning in choice.warnings:
                listener(Warned(message=warning))
        if order.dry_run:
            job = Job(order.config, run_plan, None, False, None)
        elif seat.rank == 0:
            claimed = _claim_for_all(replace(order, agents=tuple(agents) if elastic else ()), seat, store)
            if claimed is None:
                listener(nothing_left(order))
                return ExitCode.FINISHED
            config = named(order.config, claimed.folder)
            job = Job(config, run_plan, claimed.folder, not claimed.fresh, None)
        else:
            found = _hear_of_claim(seat, store, flag)
            if found is None:
                return ExitCode.FINISHED
            folder, resumed = found
            job = Job(named(order.config, folder), run_plan, folder, resumed, None)
        choice.reservation.name_run(job.config.run.name or order.stem)
        if job.config.data.batch_size == "auto":
            job = replace(job, config=_with_found_batch(job, seat, store, choice, listener, flag))
        code = _train(job, seat, store, claimed, choice, listener, flag)
    except KeyboardInterrupt:
        print(f"rank {seat.rank} was asked to stop before the run began", file=sys.stderr)
        code = ExitCode.STOPPED
    except UsageError as error:
        if claimed is not None:
            claimed.discard()
        if seat.rank == 0:
            store.set("refused", "yes")
            raise
        if not _rank_0_refuses(store):
            for problem in error.problems:
                print(f"error: rank {seat.rank}: {problem}", file=sys.stderr)
        return ExitCode.REFUSED
    finally:
        choice.reservation.release()
        if claimed is not None:
            claimed.ownership.release()
        if seat.rank == 0:
            clear_meeting_point(method)
    # torchrun would start a process anew that ends with anything but 0.
    return ExitCode.FINISHED if code == ExitCode.STOPPED and launcher == "env" else code


def _rank_0_refuses(store: Store) -> bool:
    """Whether rank 0 found the same fault, and says it for all. Where it does not, the fault is of this host alone."""
    try:
        store.wait(["refused"], timedelta(seconds=SAME_FAULT_SECONDS))
    except RuntimeError as error:
        # A store that is gone went with rank 0.
        return "timeout" not in str(error).lower()
    return True


def _claim_for_all(order: Order, seat: Seat, store: Store) -> Claim | None:
    """Rank 0 takes the run's folder and tells the others which, or that it could not."""
    run, before = order.config.run, run_of_agents(order.root, list(order.agents))
    if before is not None and run.name in (None, before.name):
        # torchrun started the world anew: the run is to go on where it was, and no other may be taken.
        run = run.model_copy(update={"resume": True, "name": before.name})
        order = replace(order, config=order.config.model_copy(update={"run": run}))
    news: dict[str, object] = {"refused": True}
    try:
        claimed = take_folder(order)
        news = {"folder": str(claimed.folder.path), "resumed": not claimed.fresh} if claimed else {}
        return claimed
    finally:
        store.set("claim", json.dumps(news))
        if "folder" not in news and seat.world_size > 1:
            # This process may hold the store, and is about to end.
            store.wait([f"heard/{rank}" for rank in range(1, seat.world_size)], timedelta(seconds=HEAR_SECONDS))


def _hear_of_claim(seat: Seat, store: Store, flag: StopFlag) -> tuple[RunFolder, bool] | None:
    """The run's folder and whether it has a history; None where nothing is left to do. Raises UsageError."""
    news = json.loads(await_key(store, "claim", flag))
    store.set(f"heard/{seat.rank}", "yes")
    if news.get("refused"):
        raise UsageError.one("", "rank 0 could not take the run's folder")
    return (RunFolder(Path(news["folder"])), bool(news["resumed"])) if news else None


def _with_found_batch(job: Job, seat: Seat, store: Store, choice: Choice, listener: Listener, flag: StopFlag) -> Config:
    """The config with a number for `data.batch_size: auto`, which rank 0 finds on its own device and tells the others.
    Raises UsageError, on every rank alike."""
    if seat.rank > 0:
        told = json.loads(await_key(store, "batch", flag))
        if "images" not in told:
            raise UsageError.one(*told["problem"])
        return with_batch(job.config, told["images"])

    def between() -> None:
        choice.reservation.touch()
        if flag.raised:
            raise KeyboardInterrupt

    news: dict[str, object] = {"problem": ["", "rank 0 found no batch size"]}
    try:
        images = batch_before(job.folder) if job.folder and job.resumed else None
        if images is None:
            found = find_batch(job.config, job.plan, seat.world_size, open_early(job.config), between)
            listener(BatchFound(message=found.in_words(job.config)))
            images = found.images
        news = {"images": images}
        return with_batch(job.config, images)
    finally:
        store.set("batch", json.dumps(news))


def _train(
    job: Job, seat: Seat, store: Store, claimed: Claim | None, choice: Choice, listener: Listener, flag: StopFlag
) -> int:
    from engine.training.train import train

    device = job.plan.devices[job.plan.place(seat.local_rank)]
    recorder = open_recorder(claimed.folder, job.config, listener) if claimed else None
    asked, beats = Asked(), Beats(1)
    usage = UsageWatch([device.uuid for device in choice.devices] if seat.local_rank == 0 and job.folder else [])
    watchdog = _watchdog(Watchdog(beats, job.config.run.watchdog), seat.rank, device, recorder)
    if recorder is not None and claimed is not None:
        record = _watched(recorder, claimed, NodesUsage(usage, store, choice.reservation), asked)
    else:
        record = listener if seat.rank == 0 else _tell_on_stderr(seat.rank)

    def between() -> None:
        # Not earlier, because loader processes are forked before.
        if not watchdog.is_alive():
            watchdog.start()
        if recorder is None:
            tell_usage(usage, store, seat)

    channel = DirectChannel(record, flag, asked, Marker(beats, 0), between)
    try:
        outcome = train(job, seat, store, channel)
        if recorder is None:
            return ExitCode.STOPPED if outcome == "stopped" else ExitCode.FINISHED
        if outcome == "stopped" and not recorder.history.stopping:
            # By a signal, to this rank or to another.
            recorder.record(Control(request="stop", by=flag.by or "a signal", outcome="done"))
        requeues = job.config.run.requeue and flag.warned
        return end_run(Ending(outcome), recorder, listener, requeues=requeues)
    except UsageError:
        raise
    except Exception as error:
        failure = failure_of(seat.rank, device, error, job.config)
        if recorder is not None:
            return close_run(Ending("failed", failure), recorder)
        print(f"{failure_in_words(failure)}\n{failure.traceback}", file=sys.stderr)
        return ExitCode.FAILED
    finally:
        if recorder is not None:
            recorder.close()
        usage.close()


def _tell_on_stderr(rank: int) -> Listener:
    """What a rank that records nothing has to say goes to the launcher's log."""

    def tell(event: Event) -> None:
        if (line := line_of(event)) is not None:
            print(f"rank {rank}: {line}", file=sys.stderr)

    return tell


def _watchdog(watchdog: Watchdog, rank: int, device: str, recorder: Recorder | None) -> threading.Thread:
    """A thread that ends this process when it makes no step for too long: each rank says where it stands, and the
    launcher starts them anew."""

    def watch() -> None:
        while (beats := watchdog.expired()) is None:
            time.sleep(WATCH_SECONDS)
        cause = f"no step was made for {watchdog.limit:g} s (run.watchdog): {standing(beats[0])}"
        failure = RankFailed(rank=rank, device=device, cause=cause)
        print(failure_in_words(failure), file=sys.stderr)
        faulthandler.dump_traceback()
        if recorder is not None:
            # What stands still may be the disk that this goes to.
            threading.Timer(RECORD_SECONDS, os._exit, [ExitCode.FAILED]).start()
            close_run(Ending("failed", failure), recorder)
        os._exit(ExitCode.FAILED)

    return threading.Thread(target=watch, name="watchdog", daemon=True)


def _watched(recorder: Recorder, claimed: Claim, nodes: NodesUsage, asked: Asked) -> Listener:
    """A listener that starts, with its first event, a thread that renews the heartbeat, looks at the GPUs and takes
    requests: not earlier, because loader processes are forked before."""

    def watch() -> None:
        while not recorder.closed.wait(WATCH_SECONDS):
            claimed.ownership.beat()
            for event in nodes.look():
                recorder.record(event)
            for request in take_requests(claimed.folder.control):
                outcome = asked.take(request.request)
                recorder.record(Control(request=request.request, by=request.by, outcome=outcome))

    thread = threading.Thread(target=watch, name="control", daemon=True)

    def record_and_watch(event: Event) -> None:
        if isinstance(event, RunStarted):
            claimed.fresh = False
            nodes.begin(event)
        if not thread.is_alive():
            thread.start()
        recorder.record(event)

    return record_and_watch
