"""What external ranks exchange through the store of their rendezvous before the run starts; `external` calls it.

torchrun keeps one store over all restarts of its ranks, so it may hold keys of an earlier attempt. The ranks therefore
first agree on a unique name of their attempt, the prefix of all further keys.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

from engine.base.codec import Count, Record
from engine.base.errors import UsageError
from engine.base.exit_codes import ExitCode
from engine.base.process import SignalHandler, boot_id, process_start_ticks
from engine.config.training_sections import AmpLevel
from engine.jobs.launch.request import RunRequest
from engine.runs.claim import read_claim
from engine.runs.find import newest_first
from engine.runs.folder import RunFolder, list_runs
from engine.train.distributed.messages import PeerFailedError, decode_message, send
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.rendezvous import store_timeout_s

if TYPE_CHECKING:
    from torch.distributed import Store

    from engine.train.loop.job import Job

STORE_POLL_SECONDS = 0.05
EXIT_TIMEOUT_SECONDS = 5.0  # a rank that exits before the run began waits this long for the others
EXIT_CODE_KEY = "rank_0_exit_code"
RECEIVED_KEY = "rank_0_exit_code/received"

MessageT = TypeVar("MessageT", bound=Record)


class RankZeroEndedError(Exception):
    """Rank 0 ended before the run started, and reports why for all ranks."""

    def __init__(self, exit_code: ExitCode) -> None:
        super().__init__(f"rank 0 ended with exit code {exit_code:d}")
        self.exit_code = exit_code


class Announcement(Record, frozen=True, kw_only=True):
    """A rank that waits for rank 0: its unique name, and its agent."""

    name: str
    agent: str

    @classmethod
    def of_this_process(cls) -> Announcement:
        return cls(name=uuid.uuid4().hex, agent=agent_id())


class PreparedJob(Record, frozen=True, kw_only=True):
    """What rank 0 has decided: the run folder, None in a dry run, and the keys of the config that may be auto.

    `capability` is the lowest of the GPUs of all ranks. Precision and memory format follow from it, and DDP needs the
    same on all ranks."""

    folder: str | None
    resumed: bool
    batch_size: Count | Literal["auto"]
    amp: AmpLevel
    capability: tuple[Count, Count] | None

    @classmethod
    def of(cls, job: Job) -> PreparedJob:
        """Return the message about a job of rank 0."""
        return cls(
            folder=None if job.folder is None else str(job.folder.path),
            resumed=job.resumed,
            batch_size=job.config.data.batch_size,
            amp=job.config.precision.amp,
            capability=job.plan.capability,
        )


def agent_id() -> str:
    """Return a globally unique name of the process that started this one, torchrun's agent."""
    pid = os.getppid()
    return f"{socket.gethostname()}/{boot_id()}/{pid}/{process_start_ticks(pid)}"


def wait_for_key(store: Store, key: str, stop_flag: SignalHandler, sender: int = 0) -> str:
    """Return the value that rank `sender` sets.

    Raises PeerFailedError after `device.timeout` seconds, KeyboardInterrupt if this process receives a stop request,
    RankZeroEndedError if rank 0 ends first, and UsageError if the store is gone."""
    polls, timeout_s = 0, store_timeout_s(store)
    try:
        while not store.check([key]):
            if stop_flag.is_set:
                raise KeyboardInterrupt
            if store.check([EXIT_CODE_KEY]):
                raise RankZeroEndedError(_receive_exit_code(store))
            # Counts polls instead of seconds: Slurm may suspend all ranks for hours.
            polls += 1
            if polls * STORE_POLL_SECONDS > timeout_s:
                what = key.partition("/")[0]
                raise PeerFailedError(
                    f"rank {sender} did not send its {what} within {timeout_s:g} s (device.timeout)", code="timed-out"
                )
            time.sleep(STORE_POLL_SECONDS)
        return store.get(key).decode()
    except RuntimeError as error:
        raise UsageError.one(
            "", "rank 0 ended before the run began", "see its output for the error", code="rank-failed"
        ) from error


def wait_for_message(
    store: Store, key: str, kind: type[MessageT], stop_flag: SignalHandler, sender: int = 0
) -> MessageT:
    """Return the message that rank `sender` sends under `key`. Raises the errors of `wait_for_key`, and PeerFailedError
    if it is not valid."""
    return decode_message(wait_for_key(store, key, stop_flag, sender).encode(), key, kind)


def handshake(store: Store, rank_info: RankInfo, stop_flag: SignalHandler) -> tuple[str, list[Announcement]]:
    """Return a unique name of this attempt, the same on all ranks, and on rank 0 the announcements of all ranks.

    Every rank announces itself under a unique name. Rank 0 answers each announcement, including those of earlier
    attempts, until all ranks have acknowledged an answer."""
    own = Announcement.of_this_process()
    if rank_info.rank > 0:
        send(store, f"announce/{rank_info.rank}", own)
        attempt = wait_for_key(store, f"attempt/{own.name}", stop_flag)
        store.add(f"ack/{attempt}", 1)
        return attempt, []
    answered = {0: own}
    deadline = time.monotonic() + store_timeout_s(store)
    while store.add(f"ack/{own.name}", 0) < rank_info.world_size - 1:
        for rank in range(1, rank_info.world_size):
            if not store.check([key := f"announce/{rank}"]):
                continue
            announcement = decode_message(store.get(key), key, Announcement)
            if answered.get(rank) != announcement:
                answered[rank] = announcement
                store.set(f"attempt/{announcement.name}", own.name)
        if stop_flag.is_set:
            # A rank without an answer would not learn that this one ends.
            deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT_SECONDS)
        if time.monotonic() > deadline:
            if stop_flag.is_set:
                raise KeyboardInterrupt
            raise PeerFailedError(
                f"not all ranks responded within {store_timeout_s(store):g} s (device.timeout)", code="timed-out"
            )
        time.sleep(STORE_POLL_SECONDS)
    return own.name, list(answered.values())


def share_exit_code(store: Store, code: ExitCode, world_size: int) -> None:
    """Send the exit code of rank 0 to the other ranks before the run starts, and wait until all have received it.

    The store may be in this process, and its file is deleted when this process ends. A rank that does not poll the
    store, such as one that is blocked in a collective, is not waited for longer than `EXIT_TIMEOUT_SECONDS`."""
    deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
    with suppress(RuntimeError):
        store.set(EXIT_CODE_KEY, str(int(code)))
        while store.add(RECEIVED_KEY, 0) < world_size - 1 and time.monotonic() < deadline:
            time.sleep(STORE_POLL_SECONDS)


def exit_code_of_rank_0(store: Store, timeout_s: float = EXIT_TIMEOUT_SECONDS) -> ExitCode | None:
    """Return the exit code that rank 0 shares; None after `timeout_s`, if only this rank was refused."""
    deadline = time.monotonic() + timeout_s
    try:
        while not store.check([EXIT_CODE_KEY]):
            if time.monotonic() > deadline:
                return None
            time.sleep(STORE_POLL_SECONDS)
        return _receive_exit_code(store)
    except RuntimeError:
        # Rank 0 hosts the store: if the store is gone, rank 0 has exited.
        return ExitCode.USAGE_ERROR


def _receive_exit_code(store: Store) -> ExitCode:
    code = ExitCode(int(store.get(EXIT_CODE_KEY)))
    store.add(RECEIVED_KEY, 1)
    return code


def continue_run_of_agents(request: RunRequest) -> RunRequest:
    """Return the request to resume the run of ranks that torchrun has restarted: they must not claim another one.

    It is the newest run that ranks of one of these agents trained."""
    run, agents = request.config.run, {*request.agents}
    found = newest_first([each for each in list_runs(request.runs_dir) if agents & _claiming_agents(each)])
    if not found or run.name not in (None, found[0].name):
        return request
    return replace(request, config=request.config.with_values(run={"resume": True, "name": found[0].name}))


def _claiming_agents(run: RunFolder) -> set[str]:
    """Return the agents whose ranks trained a run of this user. Another user could name any agent."""
    claim = read_claim(run.owner) if run.is_own else None
    return set() if claim is None else set(claim.agents)
