"""Ranks under an external launcher that fail, die or are stopped before the run begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store, TCPStore

from engine.base.errors import Problem
from engine.base.exit_codes import ExitCode
from engine.base.process import SignalHandler, die_with_parent
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.gpus.selection import CudaDevice
from engine.jobs.launch import external, handshake
from engine.jobs.launch import node as external_failures
from engine.jobs.launch.handshake import continue_run_of_agents
from engine.jobs.launch.node import (
    collect_preflights,
    find_root_cause,
    publish_failure,
    share_preflight,
    share_stall,
    stall_failure,
    watchdog_thread,
)
from engine.jobs.launch.preflight import Preflight
from engine.jobs.launch.request import RunRequest
from engine.runs.events import RankFailed
from engine.train.distributed.messages import PeerFailedError
from engine.train.distributed.node_plan import plan_node
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.watchdog import Heartbeat, Heartbeats, Phase, Watchdog
from support.gputrain_command import Gputrain
from support.messages import raises_problem, says
from support.runs.event_factories import make_run_started
from support.runs.factories import find_free_port, make_run_folder
from support.runs.run_owner import Owner

PATCHED_RUN = """
import os, signal, sys, time
import tui
from engine.jobs.launch import external, phases

def replaced_preflight(*_):
    {preflight}

run_preflight = external.run_preflight
external.run_preflight = replaced_preflight
{patch}
sys.argv = ["gputrain", *sys.argv[1:]]
sys.exit(tui.main())
"""
CONTINUE = "return run_preflight(*_)"


def start_ranks(
    gputrain: Gputrain, preflights: Sequence[str], *arguments: str, patch: str = ""
) -> list[subprocess.Popen[str]]:
    """Start a rank for each of these bodies of `run_preflight`, with the variables of torchrun."""
    world = {"WORLD_SIZE": str(len(preflights)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    return [
        gputrain.start(
            *(sys.executable, "-c", PATCHED_RUN.format(preflight=body, patch=patch)),
            *("run", "--headless", "digits", "--epochs", "1", "--model", "linear", "--name", "a", *arguments),
            env=gputrain.environment | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, body in enumerate(preflights)
    ]


def wait_for_ranks(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = 40.0) -> list[tuple[int, str]]:
    """Return the exit code and the messages of each rank."""
    deadline = time.monotonic() + timeout_s
    messages = [rank.communicate(timeout=max(deadline - time.monotonic(), 0.1))[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, messages, strict=True)]


def store_with_timeout(seconds: float) -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    return store


@pytest.mark.nightly
def test_rank_0_fails_if_another_rank_dies_in_preflight(gputrain: Gputrain) -> None:
    ranks = start_ranks(gputrain, [CONTINUE, "os.kill(os.getpid(), signal.SIGKILL)"], "device.timeout=6")
    (code, messages), _ = wait_for_ranks(ranks)
    assert code == ExitCode.FAILED
    assert says(messages, "timed-out", "error: rank 1 ", " 6 s (device.timeout)")
    assert not gputrain.runs.exists()


@pytest.mark.nightly
def test_other_ranks_end_if_rank_0_crashes_before_run(gputrain: Gputrain) -> None:
    ranks = start_ranks(gputrain, ["raise OSError('bad disk')", CONTINUE])
    (code, messages), other = wait_for_ranks(ranks)
    assert code == ExitCode.FAILED
    assert "OSError: bad disk" in messages
    assert other == (ExitCode.FAILED, "")


def test_restart_by_torchrun_takes_over_run_of_its_own_agents(tmp_path: Path) -> None:
    """Their host may be gone, and its clock ahead."""
    folder = make_run_folder(tmp_path, "a", make_run_started())
    claim = {"format": 1, "host": "node7", "pid": 7, "agents": ["node7/5/1.00"], "heartbeat": None}
    folder.owner.write_text(json.dumps(claim))
    request = continue_run_of_agents(RunRequest(Config(), tmp_path, "x", agents=("node7/5/1.00", "node8/6/2.00")))
    assert (request.config.run.resume, request.config.run.name) == (True, "a")
    other = continue_run_of_agents(RunRequest(Config(), tmp_path, "x", agents=("node8/6/2.00",)))
    assert not other.config.run.resume


@pytest.mark.parametrize(
    ("variables", "start_method"),
    [({}, "env"), pytest.param({"TORCHELASTIC_RUN_ID": "1"}, "torchrun", marks=pytest.mark.nightly)],
    ids=["env", "torchrun"],
)
def test_run_reports_torchrun_only_with_its_variables(
    gputrain: Gputrain, variables: dict[str, str], start_method: str
) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    port = str(find_free_port())
    done = gputrain(
        *("run", "--headless", "digits", "--model", "linear", "--dry-run", "--launcher", "env"),
        **world,
        **variables,
        MASTER_PORT=port,
    )
    assert done.returncode == 0, done.stderr
    assert f"start method       {start_method}\n" in done.stdout


def test_handshake_of_interrupted_rank_0_answers_other_ranks() -> None:
    store, stop_flag = HashStore(), SignalHandler()
    stop_flag.handle_signal(signal.SIGTERM)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(handshake.handshake, store, RankInfo(0, 2, 0, 2), stop_flag)
        time.sleep(0.2)
        second = pool.submit(handshake.handshake, store, RankInfo(1, 2, 1, 2), SignalHandler())
        assert first.result(timeout=10)[0] == second.result(timeout=10)[0]


def test_handshake_ends_without_other_ranks() -> None:
    with raises_problem("timed-out", None, "0.3 s", "device.timeout", kind=PeerFailedError):
        handshake.handshake(store_with_timeout(0.3), RankInfo(0, 2, 0, 2), SignalHandler())
    with raises_problem("timed-out", None, " 0 ", "0.3 s", "device.timeout", kind=PeerFailedError):
        handshake.handshake(store_with_timeout(0.3), RankInfo(1, 2, 1, 2), SignalHandler())


def test_rank_that_is_stopped_in_its_preflight_stops_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, store = RunRequest(resolve_config("digits", []).config, tmp_path, "x"), HashStore()
    monkeypatch.setattr(external, "run_preflight", lambda *_: Preflight())
    problem = Problem("", "rank 1 failed in the preflight: it was stopped", code="stopped")
    share_preflight(RankInfo(1, 2, 1, 2), store, [problem])
    rank_0 = external._ConnectedRank(RankInfo(0, 2, 0, 2), "torchrun", SignalHandler(), store, [])
    with pytest.raises(KeyboardInterrupt):
        external._run_preflight_on_all_ranks(rank_0, Owner(request).requested)


def test_rank_0_plans_with_the_lowest_capability_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CudaDevice(0, "GPU-0", "made up", 0, capability=(8, 0))
    request = RunRequest(resolve_config("digits", ["device.gpus=0", "precision.amp=auto"]).config, tmp_path, "x")
    planned = Preflight()
    planned.use_plan(plan_node(request.config, [gpu], 1, 2), request.config)
    assert planned.amp.level == "bf16"
    monkeypatch.setattr(external, "run_preflight", lambda *_: planned)
    store = HashStore()
    share_preflight(RankInfo(1, 2, 0, 1), store, [], (7, 0))
    rank_0 = external._ConnectedRank(RankInfo(0, 2, 0, 1), "torchrun", SignalHandler(), store, [])
    _, preflight = external._run_preflight_on_all_ranks(rank_0, Owner(request).requested)
    assert preflight.plan is not None and preflight.plan.capability == (7, 0)
    assert preflight.amp.level == "off"


@pytest.mark.parametrize("data", ["{", "[]", '{"host": 5}', '{"host": "second"}'])
def test_collect_preflights_names_invalid_message_of_another_rank(data: str) -> None:
    store = HashStore()
    store.set("preflight/1", data)
    with raises_problem("damaged", None, "preflight/1", "gputrain", kind=PeerFailedError):
        collect_preflights(RankInfo(0, 2, 0, 2), store, SignalHandler())


WAITS = Heartbeat(11, 2, Phase.BACKWARD)
HANGS = Heartbeat(11, 0, Phase.DATA)


@pytest.fixture
def store() -> Store:
    """A store in which three ranks have published their devices."""
    store = HashStore()
    for rank in range(3):
        watchdog_thread(Watchdog(Heartbeats(1), 600.0), RankInfo(rank, 3, rank, 3), f"GPU-{rank}", store, None)
    return store


@pytest.fixture
def hung_store() -> Iterator[Store]:
    """The store of another process, which is stopped."""
    receiver, sender = os.pipe()
    parent, host = os.getpid(), os.fork()
    if host == 0:
        try:
            die_with_parent(parent)
            server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(sender, str(server.port).encode())
            signal.pause()
        finally:
            os._exit(1)
    store = TCPStore("127.0.0.1", int(os.read(receiver, 8)), is_master=False)
    os.kill(host, signal.SIGSTOP)
    yield store
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    os.close(receiver)
    os.close(sender)


def report(
    store: Store,
    rank: int,
    heartbeat: Heartbeat,
    delay_s: float = 0.0,
    world_size: int = 2,
) -> RankFailed:
    time.sleep(delay_s)
    rank_info = RankInfo(rank, world_size, rank, world_size)
    return stall_failure(share_stall(f"GPU-{rank}", heartbeat, rank_info, store), rank_info, 600.0)


@pytest.mark.parametrize("delays_s", [(0.0, 0.2), (0.2, 0.0)], ids=["waiting rank first", "hung rank first"])
def test_all_ranks_report_the_rank_that_lags(delays_s: tuple[float, float], store: Store) -> None:
    with ThreadPoolExecutor() as pool:
        reports = [pool.submit(report, store, rank, (WAITS, HANGS)[rank], delays_s[rank]) for rank in range(2)]
        failures = [future.result(timeout=20) for future in reports]
    assert [(failure.rank, failure.device) for failure in failures] == [(1, "GPU-1"), (1, "GPU-1")]
    assert failures[0].cause == (
        "no progress for 600 s (run.watchdog); the other ranks wait for rank 1; this rank completed 11 steps and is "
        "waiting for data; its traceback is on stderr"
    )


def test_rank_reports_ranks_that_do_not_respond(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setattr(external_failures, "COMPARE_SECONDS", 1.0)
    failure = report(store, 0, WAITS, world_size=3)
    assert (failure.rank, failure.device) == (1, "GPU-1")
    assert failure.cause == (
        "no progress for 600 s (run.watchdog); the other ranks wait for ranks 1, 2; this rank did not respond"
    )


def test_rank_reports_itself_if_store_hangs(monkeypatch: pytest.MonkeyPatch, hung_store: Store) -> None:
    monkeypatch.setattr(external_failures, "COMPARE_SECONDS", 0.2)
    failure = report(hung_store, 0, WAITS)
    assert (failure.rank, failure.device) == (0, "GPU-0")
    assert "wait for" not in failure.cause


def test_rank_reports_itself_if_all_ranks_are_equal(store: Store) -> None:
    with ThreadPoolExecutor() as pool:
        reports = [pool.submit(report, store, rank, WAITS) for rank in range(2)]
        assert [future.result(timeout=20).rank for future in reports] == [0, 1]


LOST = RankFailed(
    rank=0, device="cpu", cause="it lost the connection to another rank", code="connection-failed", lost_peer=True
)


def test_rank_0_reports_failure_that_another_rank_publishes() -> None:
    store = HashStore()
    publish_failure(
        RankFailed(rank=1, device="cpu", cause="it lost the connection", code="connection-failed", lost_peer=True),
        store,
    )
    own_failure = RankFailed(
        rank=2, device="cpu", cause="ValueError: bad", code="rank-failed", traceback="Traceback\n  line", time=7.0
    )
    with ThreadPoolExecutor() as pool:
        found = pool.submit(find_root_cause, LOST, 4, store)
        publish_failure(own_failure, store)
        assert found.result(timeout=20) == own_failure


def test_rank_0_reports_its_own_failure_without_waiting() -> None:
    own_failure = RankFailed(rank=0, device="cpu", cause="ValueError: bad", code="rank-failed")
    started = time.monotonic()
    assert find_root_cause(own_failure, 2, HashStore()) == own_failure
    assert time.monotonic() - started < external_failures.COMPARE_SECONDS


def test_rank_0_reports_lost_connection_if_no_other_rank_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_failures, "COMPARE_SECONDS", 0.1)
    assert find_root_cause(LOST, 2, HashStore()) == LOST
