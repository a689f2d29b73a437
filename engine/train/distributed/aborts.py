"""The failure of a rank that SIGABRT has killed, from the lines that it left in the log.

When a collective times out or CUDA fails, the watchdog thread of torch's ProcessGroupNCCL ends the process before
Python can report an exception (pytorch#126544). `engine.jobs.launch.ranks` then reads the cause here.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from engine.base.exits import exit_status
from engine.base.files import open_regular_file
from engine.base.text import printable
from engine.runs.events import RankFailed
from engine.train.distributed.cuda_errors import find_known_error, nccl_last_error, shorten

# A kernel with a failed assertion prints a line per thread.
MAX_LOG_BYTES = 2**20

# All ranks write to the same log. torch marks its lines with "[rank1]:" or "[PG ID 0 PG GUID 0(default_pg) Rank 1]".
_RANK_MARK = re.compile(r"^\[rank(\d+)\]:|\bRank (\d+)\]")
_PREFIXES = re.compile(r"^(\[[^\]]*\]:?\s*)+")
_EXCEPTION = re.compile(
    r"terminated with exception: (.+)|^\s*what\(\):\s+(.+)|Aborting process on rank \d+ due to error - (.+)",
    re.MULTILINE,
)
_TIMED_OUT = re.compile(
    r"^.*(?:Watchdog caught collective operation timeout|watchdog got stuck for|Heartbeat monitor timed out"
    # Since torch 2.15.
    r"|Operation timed out after|Aborting process on rank \d+ due to timeout).*$",
    re.MULTILINE,
)
_LOST_PEER = re.compile(
    r"^.*(?:ncclRemoteError|remote process exited|communicator was aborted|Connection (?:closed|reset)"
    # torch also ends ranks that have not timed out themselves.
    r"|dump signal due to a collective timeout from).*$",
    re.MULTILINE,
)


def read_log_tail(log: Path, start: int) -> str:
    """Return the end of the log, at most `MAX_LOG_BYTES`, without the first `start` bytes; "" if it cannot be read."""
    try:
        with open_regular_file(log) as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
            return file.read(MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def abort_failure(rank: int, device: str, log_text: str) -> RankFailed:
    """Return the failure of a rank that was killed by SIGABRT; `log_text` holds the lines of all ranks."""
    status = f"it {exit_status(-signal.SIGABRT)}"
    text = _lines_of_rank(log_text, rank)
    if (known := find_known_error(text)) is not None:
        return RankFailed(rank=rank, device=device, cause=printable(known.reason), code=known.code)
    if (match := _TIMED_OUT.search(text)) is not None:
        cause = f"{status} by torch, because it waited too long for another rank ({_quote(match[0])})"
        return RankFailed(rank=rank, device=device, cause=cause, code="timed-out", lost_peer=True, timed_out=True)
    if (match := _LOST_PEER.search(text)) is not None:
        cause = f"{status} by torch, because it lost the connection to another rank ({_quote(match[0])})"
        return RankFailed(rank=rank, device=device, cause=cause, code="connection-failed", lost_peer=True)
    message = nccl_last_error(text) or next((found[found.lastindex or 0] for found in _EXCEPTION.finditer(text)), "")
    reason = f": {_quote(message)}" if message else "; the log may contain the cause"
    return RankFailed(rank=rank, device=device, cause=status + reason, code="process-killed")


def _lines_of_rank(log_text: str, rank: int) -> str:
    """Return the lines that a rank has written, without marks. If there are none, return those without any mark.

    Lines without a mark that follow one with a mark belong to the same message.
    """
    lines: dict[int | None, list[str]] = {}
    author: int | None = None
    for line in log_text.splitlines():
        if (mark := _RANK_MARK.search(line)) is not None:
            author = int(mark[1] or mark[2])
        lines.setdefault(author, []).append(_PREFIXES.sub("", line))
    return "\n".join(lines.get(rank) or lines.get(None, []))


def _quote(line: str) -> str:
    return printable(shorten(line.strip()))
