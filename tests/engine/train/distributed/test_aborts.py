"""The cause of a rank that SIGABRT has killed, from a log that all ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.train.distributed.aborts import MAX_LOG_BYTES, abort_failure, read_log_tail

# From XPixelGroup/BasicSR#737.
TIMEOUT = """\
[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 \
milliseconds before timing out.
[rank1]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception (either \
an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed NCCL work: 807.
"""
# From snowflakedb/ArcticTraining#219.
STUCK = """\
[rank1]:[E626 05:14:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL's \
watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically \
indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog
"""
# From torch 2.15 on the fake GPUs of the rehearsal.
TIMEOUT_OF_TORCH_2_15 = """\
[rank1]:[E1123 09:48:53.485318410 WorkNCCL.cpp:372] [TC][rank=1][name=0] Operation timed out after 3000 ms
[rank1]:[E1123 09:48:53.487870521 ProcessGroupNCCL.cpp:638] [TC][rank=1][name=0] Aborting process on rank 1 due to \
timeout - timeout watchdog detected operation timeout
"""
# From modelscope/ms-swift#8371.
ASSERT = """\
[rank1]:[E318 09:26:18.141499142 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group \
watchdog thread terminated with exception: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:42 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string) + 0x80 (0x7f6e21d7eeb0 in libc10.so)
"""
# From sgl-project/sglang#271; the line of an older torch has no mark at its beginning.
OLD_ASSERT = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG 1 Rank 1] Process group watchdog thread terminated with exception: CUDA error: device-side assert \
triggered
"""
# From tatsu-lab/stanford_alpaca#207.
REMOTE = """\
[rank1]:[E413 10:11:12.131415161 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group \
watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL \
version 2.14.3
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129
"""


@pytest.mark.parametrize(
    "text", [TIMEOUT, STUCK, TIMEOUT_OF_TORCH_2_15], ids=["collective", "NCCL thread", "torch 2.15"]
)
def test_abort_after_a_timeout_is_caused_by_another_rank(text: str) -> None:
    failure = abort_failure(1, "cpu", text)
    assert failure.lost_peer
    assert failure.timed_out
    assert failure.code == "timed-out" and failure.cause.startswith("it was killed by SIGABRT ")
    assert "[rank1]" not in failure.cause


@pytest.mark.parametrize("text", [ASSERT, OLD_ASSERT], ids=["torch 2.10", "torch 2.2"])
def test_abort_after_a_cuda_error_names_cause(text: str) -> None:
    failure = abort_failure(1, "cpu", text)
    assert failure.code == "bad-label" and "device.gpus=cpu" in failure.cause
    assert not failure.lost_peer


def test_abort_after_a_lost_connection_is_caused_by_another_rank() -> None:
    failure = abort_failure(1, "cpu", REMOTE)
    assert failure.lost_peer and failure.code == "connection-failed"
    assert not failure.timed_out


def test_abort_reads_only_lines_of_its_own_rank() -> None:
    failure = abort_failure(0, "cpu", ASSERT + TIMEOUT.replace("ank1", "ank0").replace("Rank 1", "Rank 0"))
    assert failure.timed_out


def test_abort_without_mark_names_message_of_exception() -> None:
    text = "terminate called after throwing an instance of 'std::bad_variant_access'\n  what():  bad \x1b[31m access\n"
    failure = abort_failure(1, "cpu", text)
    assert failure.cause == "it was killed by SIGABRT: bad \\x1b[31m access"
    assert not failure.lost_peer


def test_read_log_tail_skips_earlier_session_and_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("earlier\nnow\n")
    assert read_log_tail(log, start=8) == "now\n"
    log.write_bytes(b"x" * (MAX_LOG_BYTES + 10) + b"\xff end")
    assert read_log_tail(log, start=0).endswith("� end")
    assert len(read_log_tail(log, start=0)) == MAX_LOG_BYTES
    assert read_log_tail(tmp_path / "missing", 0) == ""
