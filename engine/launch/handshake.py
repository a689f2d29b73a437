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
from engine.distributed.rank_env import Seat
from engine.runs.folder import SILENT_SECONDS, RunFolder, all_runs
from engine.training.job import ExitCode
from engine.utils.errors import UsageError
from engine.utils.files import read_json

if TYPE_CHECKING:
    from torch.distributed import Store

LOOK_SECONDS = 0.05
REFUSAL_TIMEOUT_SECONDS = 5.0
EXIT_CODE_KEY = "rank_0_exit_code"


def agent() -> str:
    """The process that started this one, told apart from any other on any host: torchrun's agent."""
    pid = os.getppid()
    try:
        since = psutil.Process(pid).create_time()
    except psutil.Error:
        since = 0.0
    return f"{socket.gethostname()}/{pid}/{since:.2f}"


def await_key(store: Store, key: str, flag: StopFlag) -> str:
    """What another rank tells, however long it waits for GPUs itself. Raises KeyboardInterrupt where this process is
    asked to stop meanwhile, UsageError where that rank has gone."""
    try:
        while not store.check([key]):
            if flag.raised:
                raise KeyboardInterrupt
            time.sleep(LOOK_SECONDS)
        return store.get(key).decode()
    except RuntimeError as error:
        raise UsageError.one("", "the rank that was to tell of the run has gone") from error


def meet(store: Store, seat: Seat, flag: StopFlag) -> tuple[str, list[str]]:
    """A name of this world that no other had, the same on all ranks; and, on rank 0, the agents of all. Every rank says
    hello under a name of its own; rank 0 answers each hello that it finds, also one that a dead rank has left, until
    all have heard."""
    mine = uuid.uuid4().hex
    if seat.rank > 0:
        store.set(f"hello/{seat.rank}", json.dumps({"name": mine, "agent": agent()}))
        world = await_key(store, f"world/{mine}", flag)
        store.add(f"heard/{world}", 1)
        return world, []
    answered: dict[int, str] = {}
    agents = {0: agent()}
    while store.add(f"heard/{mine}", 0) < seat.world_size - 1:
        for rank in range(1, seat.world_size):
            if not store.check([f"hello/{rank}"]):
                continue
            hello = json.loads(store.get(f"hello/{rank}"))
            if answered.get(rank) != hello["name"]:
                answered[rank], agents[rank] = hello["name"], hello["agent"]
                store.set(f"world/{hello['name']}", mine)
        if flag.raised:
            raise KeyboardInterrupt
        time.sleep(LOOK_SECONDS)
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
            time.sleep(LOOK_SECONDS)
        return ExitCode(int(store.get(EXIT_CODE_KEY)))
    except RuntimeError:
        # The store ended with rank 0.
        return ExitCode.REFUSED


def run_of_agents(root: Path, agents: list[str]) -> RunFolder | None:
    """The newest run that was trained by a world of one of these agents, once its owner is gone: on another host it may
    have died without a word."""
    for run in all_runs(root):
        owner = read_json(run.owner) or {}
        before = owner.get("agents")
        if isinstance(before, list) and set(agents) & set(map(str, before)):
            deadline = time.monotonic() + SILENT_SECONDS + 1
            while run.owned() and time.monotonic() < deadline:
                time.sleep(1)
            return run
    return None
