"""Root cause of several failures, and detection of lost connections to other ranks."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from torch._utils import ExceptionWrapper

from engine.base.errors import Problem, UsageError
from engine.config.user_errors import UserCodeError
from engine.runs.events import RankFailed
from engine.train.data.sources.base import UnreadableImageError
from engine.train.distributed.failures import find_cause, late_ranks, lost_peer, rank_failure, root_cause
from engine.train.distributed.watchdog import Heartbeat, Phase
from support.replace import replace

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Broken pipe"),
        dist.DistStoreError("Timed out after 601 seconds waiting for clients. 1/2 clients joined."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lost_peer_is_true_for_communication_errors(error: Exception) -> None:
    assert lost_peer(error)
    assert rank_failure(1, "cpu", error).lost_peer


UNIQUE_ID = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: "
)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(UNIQUE_ID + "wait timeout after 660000ms, keys: /default_pg/0//cuda//0"),
        dist.DistBackendError(UNIQUE_ID + "Timeout waiting for key: default_pg/0//cuda//0 after 660000 ms"),
        dist.DistStoreError("wait timeout after 300ms, keys: /a, /b"),
        RuntimeError("Timeout waiting for key: k after 300 ms"),
        RuntimeError("Wait timeout"),
    ],
    ids=["NCCL on TCPStore", "NCCL on FileStore", "TCPStore", "get of FileStore", "wait of FileStore"],
)
def test_timeout_of_store_is_caused_by_another_rank(error: Exception) -> None:
    failure = rank_failure(1, "cpu", error)
    assert failure.lost_peer
    assert failure.timed_out
    assert failure.code == "timed-out"


def test_lost_store_while_nccl_fetches_unique_id_is_no_timeout() -> None:
    failure = rank_failure(1, "cuda", dist.DistBackendError(UNIQUE_ID + "Failed to recv, got 0 bytes"))
    assert failure.lost_peer
    assert not failure.timed_out


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the label of nccl.jpg is missing"),
        ConnectionResetError(104, "Connection reset by peer"),
        RuntimeError("CUDA error: out of memory in an NCCL call"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ],
    ids=["matching words only", "connection of user code", "out of memory", "other"],
)
def test_lost_peer_is_false_for_other_errors_of_a_rank(error: Exception) -> None:
    assert not lost_peer(error)


def test_root_cause_prefers_own_failure_over_earlier_lost_peer() -> None:
    lost_connection, own_failure = (
        rank_failure(0, "cpu", RuntimeError(GLOO)),
        rank_failure(1, "cpu", ValueError("a socket timed out")),
    )
    assert root_cause([replace(lost_connection, time=1.0), replace(own_failure, time=2.0)]).rank == 1


TIMED_OUT = RankFailed(rank=0, device="cpu", cause="a timeout", code="timed-out", lost_peer=True, timed_out=True)
LOST = RankFailed(rank=1, device="cpu", cause="a closed connection", code="connection-failed", lost_peer=True)
BEHIND, AHEAD = Heartbeat(11, 0, Phase.DATA), Heartbeat(11, 2, Phase.BACKWARD)


@pytest.mark.parametrize(
    ("failures", "heartbeats", "expected"),
    [
        ({0: TIMED_OUT}, [AHEAD, AHEAD, BEHIND], [2]),
        ({0: TIMED_OUT}, [AHEAD, AHEAD, AHEAD], [1, 2]),
        ({0: TIMED_OUT, 1: LOST}, [AHEAD, AHEAD, AHEAD], [2]),
        ({0: TIMED_OUT, 1: LOST}, [AHEAD, BEHIND, AHEAD], [1]),
        ({1: LOST}, [AHEAD, AHEAD, BEHIND], []),
        ({0: TIMED_OUT, 1: replace(LOST, lost_peer=False)}, [AHEAD, AHEAD, BEHIND], []),
    ],
    ids=["one lags", "equal", "lost connection", "late and lost connection", "no timeout", "own failure"],
)
def test_late_ranks_are_those_that_a_collective_waited_for(
    failures: dict[int, RankFailed], heartbeats: list[Heartbeat], expected: list[int]
) -> None:
    assert late_ranks(failures, heartbeats) == expected


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserCodeError("the transform failed"), "user-code-failed"),
        (UnreadableImageError("the image is gone"), "bad-image"),
        (UsageError.one("data.path", "was replaced", code="data-changed"), "worker-failed"),
    ],
    ids=["transform", "image", "usage"],
)
def test_find_cause_knows_code_of_error_that_dataloader_recreates(error: Exception, code: str) -> None:
    try:
        raise error
    except Exception:
        caught = ExceptionWrapper(sys.exc_info())
    with pytest.raises(type(error)) as recreated:
        caught.reraise()
    assert find_cause(recreated.value) == Problem("", str(error), code=code)
