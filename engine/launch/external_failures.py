"""Failures of ranks that torchrun or srun started. Rank 0 writes the journal, so the ranks share what they know.

The watchdog of a rank ends its process, so that the launcher can restart the run. Each process sees only its own
heartbeat. Before they end, the ranks compare theirs through the store of the rendezvous: the one that lags holds up the
others. A rank that fails otherwise publishes its failure, because rank 0 sees only that the connection is lost.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.distributed.failures import describe_failure, root_cause
from engine.distributed.rank_env import RankInfo
from engine.distributed.watchdog import Heartbeat, Phase, Watchdog, describe_progress, lagging_ranks
from engine.launch.lifecycle import record_result
from engine.runs.events import RankFailed
from engine.runs.journal import from_line, to_line
from engine.runs.recorder import Recorder
from engine.training.job import ExitCode, RunResult

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.5
STORE_POLL_SECONDS = 0.05
# One failure ends all ranks, but not at the same moment: their last heartbeats differ by the time of a step.
COMPARE_SECONDS = 5.0
RECORD_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class StalledRank:
    """A rank whose watchdog has expired: its last heartbeat, and the UUID of its GPU or "cpu"."""

    heartbeat: Heartbeat
    device: str


def watchdog_thread(
    watchdog: Watchdog, rank_info: RankInfo, device: str, store: Store, recorder: Recorder | None
) -> threading.Thread:
    """Return a thread that ends this process if it enters no new phase for too long. Rank 0 has the `recorder`."""

    def watch() -> None:
        while (heartbeats := watchdog.expired()) is None:
            time.sleep(POLL_SECONDS)
        faulthandler.dump_traceback()
        # What hangs may be the store or the disk of the journal.
        threading.Timer(COMPARE_SECONDS + RECORD_TIMEOUT_SECONDS, os._exit, [ExitCode.FAILED]).start()
        stalled = share_stall(StalledRank(heartbeats[0], device), rank_info, store)
        failure = stall_failure(stalled, rank_info, watchdog.timeout_s)
        print(describe_failure(failure), file=sys.stderr)
        if recorder is not None:
            record_result(RunResult("failed", failure), recorder)
        os._exit(ExitCode.FAILED)

    return threading.Thread(target=watch, name="watchdog", daemon=True)


def share_stall(this_rank: StalledRank, rank_info: RankInfo, store: Store) -> dict[int, StalledRank]:
    """Publish the last heartbeat of this rank, and return those of all ranks that have published theirs by then.

    Waits for them up to `COMPARE_SECONDS`."""
    stalled = {rank_info.rank: this_rank}
    deadline = time.monotonic() + COMPARE_SECONDS
    # A RuntimeError means that the host of the store has exited.
    with suppress(RuntimeError):
        heartbeat = this_rank.heartbeat
        message = [heartbeat.step, heartbeat.phase_count, heartbeat.phase, this_rank.device]
        store.set(f"stalled/{rank_info.rank}", json.dumps(message))
        while len(stalled) < rank_info.world_size and time.monotonic() < deadline:
            for rank in range(rank_info.world_size):
                if rank not in stalled and store.check([key := f"stalled/{rank}"]):
                    step, phase_count, phase, device = json.loads(store.get(key))
                    stalled[rank] = StalledRank(Heartbeat(step, phase_count, Phase(phase)), device)
            time.sleep(STORE_POLL_SECONDS)
    return stalled


def stall_failure(stalled: dict[int, StalledRank], rank_info: RankInfo, timeout_s: float) -> RankFailed:
    """Return the failure of the rank that lags behind: this one if it is among them."""
    lagging = lagging_ranks({rank: stall.heartbeat for rank, stall in stalled.items()})
    rank = rank_info.rank if rank_info.rank in lagging else lagging[0]
    waiting = f"; the other ranks wait for rank {rank}" if len(lagging) == 1 and len(stalled) > 1 else ""
    progress = describe_progress(stalled[rank].heartbeat)
    cause = f"no progress for {timeout_s:g} s (run.watchdog){waiting}; {progress}; its traceback is on stderr"
    return RankFailed(rank=rank, device=stalled[rank].device, cause=cause)


def publish_failure(failure: RankFailed, store: Store) -> None:
    """Send the failure of a rank to rank 0."""
    with suppress(RuntimeError):
        store.set(f"failed/{failure.rank}", to_line(failure))


def find_root_cause(failure: RankFailed, world_size: int, store: Store) -> RankFailed:
    """Return the failure that caused the one of rank 0. Waits up to `COMPARE_SECONDS` if another rank caused it."""
    failures = {failure.rank: failure}
    deadline = time.monotonic() + COMPARE_SECONDS
    with suppress(RuntimeError):
        while root_cause(list(failures.values())).lost_peer and time.monotonic() < deadline:
            for rank in range(world_size):
                if rank not in failures and store.check([key := f"failed/{rank}"]):
                    event = from_line(store.get(key).decode())
                    assert isinstance(event, RankFailed)  # noqa: S101 - `publish_failure` sends nothing else
                    failures[rank] = event
            time.sleep(STORE_POLL_SECONDS)
    return root_cause(list(failures.values()))
