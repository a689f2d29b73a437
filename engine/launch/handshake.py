"""How the ranks that a launcher started find that they belong together, how they learn that rank 0 ends before the run
begins, and which run was theirs before.

A store may hold what an earlier world has left in it: torchrun keeps one for all its restarts, and counts these for
each of its agents alone. So the ranks of a world first agree on a name for it.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.distributed.channel import StopFlag
from engine.distributed.rank_env import RankInfo
from engine.runs.folder import HEARTBEAT_TIMEOUT_SECONDS, RunFolder, list_runs
from engine.training.job import ExitCode
from engine.utils.errors import UsageError
from engine.utils.files import read_json

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_POLL_SECONDS = 0.05
REFUSAL_TIMEOUT_SECONDS = 5.0
EXIT_CODE_KEY = "rank_0_exit_code"


def agent_id() -> str:
    """The process that started this one, told apart from any other on any host: torchrun's agent."""
    pid = os.getppid()
    try:
        since = psutil.Process(pid).create_time()
    except psutil.Error:
        since = 0.0
    return f"{socket.gethostname()}/{pid}/{since:.2f}"


def wait_for_key(store: Store, key: str, stop_flag: StopFlag) -> str:
    """Return the value that another rank sets, without a time limit: it may wait for GPUs. Raises KeyboardInterrupt
    where this process is asked to stop meanwhile, UsageError where that rank has gone."""
    try:
        while not store.check([key]):
            if stop_flag.is_set:
                raise KeyboardInterrupt
            time.sleep(STORE_POLL_SECONDS)
        return store.get(key).decode()
    except RuntimeError as error:
        raise UsageError.one("", "the rank that was to tell of the run has gone") from error


def handshake(store: Store, rank_info: RankInfo, stop_flag: StopFlag) -> tuple[str, list[str]]:
    """A name of this world that no other had, the same on all ranks; and, on rank 0, the agents of all. Every rank says
    hello under a name of its own; rank 0 answers each hello that it finds, also one that a dead rank has left, until
    all have heard."""
    mine = uuid.uuid4().hex
    if rank_info.rank > 0:
        store.set(f"hello/{rank_info.rank}", json.dumps({"name": mine, "agent": agent_id()}))
        world = wait_for_key(store, f"world/{mine}", stop_flag)
        store.add(f"heard/{world}", 1)
        return world, []
    answered: dict[int, str] = {}
    agents = {0: agent_id()}
    while store.add(f"heard/{mine}", 0) < rank_info.world_size - 1:
        for rank in range(1, rank_info.world_size):
            if not store.check([f"hello/{rank}"]):
                continue
            hello = json.loads(store.get(f"hello/{rank}"))
            if answered.get(rank) != hello["name"]:
                answered[rank], agents[rank] = hello["name"], hello["agent"]
                store.set(f"world/{hello['name']}", mine)
        if stop_flag.is_set:
            raise KeyboardInterrupt
        time.sleep(STORE_POLL_SECONDS)
    return mine, list(agents.values())


def share_exit_code(store: Store, code: ExitCode) -> None:
    """Let the other ranks know that rank 0 ends before the run begins, and reports why for all of them."""
    # Without a store there is nobody left to tell.
    with suppress(RuntimeError):
        store.set(EXIT_CODE_KEY, str(int(code)))


def exit_code_of_rank_0(store: Store, timeout_s: float = REFUSAL_TIMEOUT_SECONDS) -> ExitCode | None:
    """The exit code that rank 0 shares; None where it shares none in time, because the fault is this host's alone."""
    deadline = time.monotonic() + timeout_s
    try:
        while not store.check([EXIT_CODE_KEY]):
            if time.monotonic() > deadline:
                return None
            time.sleep(STORE_POLL_SECONDS)
        return ExitCode(int(store.get(EXIT_CODE_KEY)))
    except RuntimeError:
        # The store ended with rank 0.
        return ExitCode.USAGE_ERROR


def find_run_of_agents(runs_dir: Path, agents: list[str]) -> RunFolder | None:
    """The newest run that was trained by a world of one of these agents, once its owner is gone: on another host it may
    have died without a word."""
    for run in list_runs(runs_dir):
        owner = read_json(run.owner) or {}
        before = owner.get("agents")
        if isinstance(before, list) and set(agents) & set(map(str, before)):
            deadline = time.monotonic() + HEARTBEAT_TIMEOUT_SECONDS + 1
            while run.is_owned() and time.monotonic() < deadline:
                time.sleep(1)
            return run
    return None
