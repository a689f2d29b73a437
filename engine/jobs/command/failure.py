"""Why a command failed: which rank failed first, its last lines, the OOM killer, and known errors of CUDA.

All of it comes from the exit code, the last lines of output and the files of torchrun (`PET_LOG_DIR`, see
`engine.jobs.command.environment`), so it is a guess that names its source. `engine.jobs.launch.program_run` records it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.base.exits import exit_status
from engine.base.redaction import redact_text
from engine.base.text import printable
from engine.train.distributed.aborts import read_log_tail
from engine.train.distributed.cuda_errors import find_known_error, shorten

MAX_LINES = 20
# What a shell reports of a child that SIGKILL has ended.
SHELL_SIGKILL = 128 + signal.SIGKILL

# The summary at the end of torchrun: "Root Cause (first observed failure):", then one field a line.
_ROOT_CAUSE = re.compile(
    r"^Root Cause \(first observed failure\):\n(?:.*\n){0,4}?"
    r" *rank +: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)\n *exitcode +: (?P<code>-?\d+)",
    re.MULTILINE,
)
# What torchrun logs before.
_REPORT = "] failed (exitcode: "
# torch.multiprocessing.spawn.
_SPAWNED = re.compile(r"^-- Process (?P<rank>\d+) terminated|process (?P<killed>\d+) terminated with", re.MULTILINE)
# torch marks the lines of an exception with [rank1]:, torchrun all lines with [default1]: (role and local rank).
_RANK_MARK = re.compile(r"^(?:\[[A-Za-z_]+\d+\]:)?\[rank(\d+)\]:")
# An exception, or an error in torch's own log; ranks that are fine log warnings.
_RANK_ERROR = re.compile(_RANK_MARK.pattern + r"(?: Traceback|\[E)")
_MARKS = re.compile(r"^(?:\[(?!rank)[A-Za-z_]+\d+\]:)?(?:\[rank\d+\]: ?)?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b")
# Line of a frame in a traceback. Its source lines follow, further to the right.
_FRAME = re.compile(r"(?P<indent>[ |]*)File \".*\", line \d+")
_WORD = re.compile(r"\w")
_TERMINATED = "what(): "  # of an exception in C++
_GPU_OUT_OF_MEMORY = re.compile(r"CUDA (?:driver )?error: out of memory|CUDA out of memory|OutOfMemoryError")


@dataclass(frozen=True)
class CommandFailure:
    """Why a command failed: `cause` is one sentence, `code` its kind. `rank` is the one that failed first, None if the
    command has none or that is unknown; `lines` are its last ones."""

    cause: str
    code: str
    rank: int | None = None
    lines: tuple[str, ...] = ()


def find_failure(
    exit_code: int, lines: Sequence[str], torchrun_logs: Path, *, oom_killed: bool | None
) -> CommandFailure:
    """Return why a command failed. `lines` are the last ones of its output without colors, `torchrun_logs` is the
    folder with the files of its ranks. `oom_killed` is whether the OOM killer has killed a process meanwhile; None if
    unknown."""
    output = "\n".join(lines)
    rank, local_rank, rank_code = _first_rank(output)
    # torchrun may end before it has echoed the last lines of a rank.
    own = _read_lines(torchrun_logs, local_rank)
    if rank is not None and not own:
        own = [line for line in lines if _is_of_rank(line, rank, local_rank)] or _before_report(lines)
    shown = tuple(redact_text(printable(_MARKS.sub("", line))) for line in (own or lines)[-MAX_LINES:])
    found = exit_code if rank_code is None else rank_code
    reason, code = _find_reason(found, shown, output, oom_killed)
    if rank is None or rank_code is not None or not reason:
        status = exit_status(found) if rank is None else f"it {exit_status(found)}"
        reason = f"{status}: {reason}" if reason else status
    return CommandFailure(reason, code, rank, shown)


def _first_rank(output: str) -> tuple[int | None, int | None, int | None]:
    """Return the rank that failed first, its local rank and its exit code; None for what is unknown."""
    # The last one: torchrun may have restarted its ranks.
    if summaries := [*_ROOT_CAUSE.finditer(output)]:
        summary = summaries[-1]
        return int(summary["rank"]), int(summary["local"]), int(summary["code"])
    if (spawned := _SPAWNED.search(output)) is not None:
        rank = int(spawned["rank"] or spawned["killed"])
        return rank, rank, None
    for line in output.splitlines():
        if (mark := _RANK_ERROR.match(line)) is not None:
            return int(mark[1]), None, None
    return None, None, None


def _is_of_rank(line: str, rank: int, local_rank: int | None) -> bool:
    if (mark := _RANK_MARK.match(line)) is not None:
        return int(mark[1]) == rank
    # The role of torchrun's ranks is "default" unless it is named.
    return local_rank is not None and re.match(rf"\[[A-Za-z_]+{local_rank}\]:", line) is not None


def _before_report(lines: Sequence[str]) -> list[str]:
    """Return the lines of a single rank, which have no marks: those before torchrun reports that it failed."""
    end = next((place for place, line in enumerate(lines) if _REPORT in line), len(lines))
    return [*lines[:end]]


def _find_reason(code: int, lines: Sequence[str], output: str, oom_killed: bool | None) -> tuple[str, str]:
    """Return what explains an exit code, "" if nothing does, and the kind of failure."""
    if code in (-signal.SIGKILL, SHELL_SIGKILL):
        if oom_killed:
            return "the host ran out of memory", "out-of-memory"
        unknown = "" if oom_killed is False else "unless a user did that, the host ran out of memory"
        return unknown, "process-killed"
    lines = _without_source(lines)
    everything = _without_source([_MARKS.sub("", line) for line in output.splitlines()])
    if (known := find_known_error("\n".join(lines)) or find_known_error("\n".join(everything))) is not None:
        return known.reason, known.code
    # A program may print such a line, go on and fail for another reason.
    exceptions = [line for line in lines if _EXCEPTION.search(line) or _TERMINATED in line]
    if (line := next(filter(_GPU_OUT_OF_MEMORY.search, exceptions or lines), None)) is not None:
        return f"the GPU is out of memory ({shorten(line.strip())})", "out-of-memory"
    # torch logs warnings behind an exception, and torchrun ends with a line of signs.
    for pattern in (_EXCEPTION, _WORD):
        if (line := next(filter(pattern.search, reversed(lines)), None)) is not None:
            return shorten(line.strip()), "process-failed"
    return "", "process-failed"


def _without_source(lines: Sequence[str]) -> list[str]:
    """Return lines of output without the source lines that tracebacks show: those may contain any message."""
    kept: list[str] = []
    indent: int | None = None
    for line in lines:
        if (frame := _FRAME.match(line)) is not None:
            indent = len(frame["indent"])
        elif indent is not None and len(line) - len(line.lstrip(" |")) <= indent:
            indent = None
        if frame is not None or indent is None:
            kept.append(line)
    return kept


def _read_lines(folder: Path, local_rank: int | None) -> list[str]:
    """Return the last lines that a rank of the newest start of torchrun has written to its files.

    torchrun makes RUN_ID/attempt_N/LOCAL_RANK/{stdout,stderr}.log there."""
    if local_rank is None:
        return []
    newest = _newest_folder(_newest_folder(folder))
    for name in ("stderr.log", "stdout.log"):
        text = "" if newest is None else read_log_tail(newest / str(local_rank) / name, 0)
        if lines := [line for line in text.splitlines() if line.strip()]:
            return lines[-MAX_LINES:]
    return []


def _newest_folder(parent: Path | None) -> Path | None:
    try:
        folders = [path for path in parent.iterdir() if path.is_dir()] if parent is not None else []
        return max(folders, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None
