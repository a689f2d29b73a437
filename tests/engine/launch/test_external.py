"""Ranks under an external launcher that fail, die or are stopped before the run begins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.distributed.messages import PeerFailedError
from engine.distributed.node_plan import plan_node
from engine.distributed.rank_env import RankInfo
from engine.gpus.selection import CudaDevice
from engine.launch import external, handshake
from engine.launch.handshake import continue_run_of_agents, heartbeat, wait_for_key
from engine.launch.node import collect_preflights, share_preflight
from engine.launch.preflight import Preflight
from engine.launch.request import RunRequest
from engine.runs.events import Event, WarningEvent
from engine.utils.errors import UsageError
from engine.utils.exit_codes import ExitCode
from engine.utils.process import SignalHandler
from support.gputrain_command import Gputrain
from support.messages import has_problem, raises_problem, says
from support.replace import replace
from support.runs.event_factories import make_run_started
from support.runs.factories import find_free_port, make_run_folder
from support.runs.run_owner import Owner

PATCHED_RUN = """
import os, signal, sys, time
import tui
from engine.launch import external, phases

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


@pytest.mark.nightly
def test_stopped_ranks_end_together(gputrain: Gputrain, tmp_path: Path) -> None:
    ready = [tmp_path / "ready-0", tmp_path / "ready-1"]
    stop = "open('{}', 'w').close(); time.sleep(1); os.kill(os.getpid(), signal.SIGTERM); return run_preflight(*_)"
    ranks = start_ranks(gputrain, [stop.format(path) for path in ready])
    while not all(path.exists() for path in ready):
        time.sleep(0.02)
    began = time.monotonic()
    results = wait_for_ranks(ranks)
    assert time.monotonic() - began < handshake.EXIT_TIMEOUT_SECONDS
    assert [code for code, _ in results] == [0, 0]
    assert all(says(text, "stopped", f"rank {rank} ") for rank, (_, text) in enumerate(results))
    assert [len(text.splitlines()) for _, text in results] == [1, 1]


def test_restart_by_torchrun_takes_over_run_of_its_own_agents(tmp_path: Path) -> None:
    """Their host may be gone, and its clock ahead."""
    folder = make_run_folder(tmp_path, "a", make_run_started())
    claim = {"format": 1, "host": "node7", "pid": 7, "agents": ["node7/5/1.00"], "heartbeat": None}
    folder.owner.write_text(json.dumps(claim))
    request = continue_run_of_agents(RunRequest(Config(), tmp_path, "x", agents=("node7/5/1.00", "node8/6/2.00")))
    assert (request.config.run.resume, request.config.run.name) == (True, "a")
    other = continue_run_of_agents(RunRequest(Config(), tmp_path, "x", agents=("node8/6/2.00",)))
    assert not other.config.run.resume


def test_wait_for_owner_of_restarted_ranks_is_announced_and_can_be_stopped(tmp_path: Path) -> None:
    folder, shown = make_run_folder(tmp_path, "a", make_run_started()), list[Event]()
    claim = {"format": 1, "host": "node7", "pid": 7, "agents": ["node7/5/1.00"], "heartbeat": time.time()}
    folder.owner.write_text(json.dumps(claim))
    stops = iter([None, KeyboardInterrupt()])

    def check_stop() -> None:
        if (error := next(stops)) is not None:
            raise error

    request = RunRequest(Config(), tmp_path, "x", agents=("node7/5/1.00",))
    with pytest.raises(KeyboardInterrupt):
        continue_run_of_agents(request, shown.append, check_stop)
    [warning] = [event for event in shown if isinstance(event, WarningEvent)]
    assert warning.code == "already-running" and "31 s" in warning.message and " a " in warning.message


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


def test_wait_for_key_has_no_limit_while_sender_renews_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "STORE_POLL_SECONDS", 0.01)
    store = store_with_timeout(0.5)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait_for_key, store, "job", SignalHandler())
        with heartbeat(store, rank=0):
            time.sleep(1.5)
            assert not waiting.done()
        with raises_problem("timed-out", None, " 0 ", "0.5 s", "device.timeout", kind=PeerFailedError):
            waiting.result(timeout=5)


def test_handshake_of_interrupted_rank_0_answers_other_ranks() -> None:
    store, stop_flag = HashStore(), SignalHandler()
    stop_flag.handle_signal(signal.SIGTERM)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(handshake.handshake, store, RankInfo(0, 2, 0, 2), stop_flag)
        time.sleep(0.2)
        second = pool.submit(handshake.handshake, store, RankInfo(1, 2, 1, 2), SignalHandler())
        assert first.result(timeout=10)[0] == second.result(timeout=10)[0]


def test_check_versions_refuses_hosts_with_another_version_of_gputrain() -> None:
    own = handshake.Announcement.of_this_process()
    handshake.check_versions([own, own])
    others = [replace(own, host=host, version="9.9.9") for host in ("second", "third", "third")]
    with pytest.raises(UsageError) as refused:
        handshake.check_versions([own, *others])
    assert len(refused.value.problems) == 2
    for problem, host in zip(refused.value.problems, ("second", "third"), strict=True):
        assert has_problem([problem], "wrong-version", "", host, "9.9.9", own.host, own.version)


def test_handshake_ends_without_other_ranks() -> None:
    with raises_problem("timed-out", None, "0.3 s", "device.timeout", kind=PeerFailedError):
        handshake.handshake(store_with_timeout(0.3), RankInfo(0, 2, 0, 2), SignalHandler())
    with raises_problem("timed-out", None, " 0 ", "0.3 s", "device.timeout", kind=PeerFailedError):
        handshake.handshake(store_with_timeout(0.3), RankInfo(1, 2, 1, 2), SignalHandler())


def test_collect_preflights_raises_failure_of_another_rank() -> None:
    store = HashStore()
    share_preflight(RankInfo(1, 2, 1, 2), store, failure="OSError: bad disk")
    with raises_problem("rank-failed", None, " 1 ", "OSError: bad disk", kind=PeerFailedError):
        collect_preflights(RankInfo(0, 2, 0, 2), store, SignalHandler())


def test_rank_0_plans_with_the_lowest_capability_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CudaDevice(0, "GPU-0", "made up", 0, capability=(8, 0))
    request = RunRequest(resolve_config("digits", ["device.gpus=0", "precision.amp=auto"]).config, tmp_path, "x")
    planned = Preflight()
    planned.use_plan(plan_node(request.config, [gpu], 1, 2), request.config)
    assert planned.amp.level == "bf16"
    monkeypatch.setattr(external, "run_preflight", lambda *_: planned)
    store = HashStore()
    share_preflight(RankInfo(1, 2, 0, 1), store, capability=(7, 0))
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
