"""The last collectives of each rank of a hung run. Comparing them names the rank that is missing in a collective.

torch's flight recorder keeps the last 2,000 collectives of NCCL and Gloo in each rank (TORCH_FR_BUFFER_SIZE). When the
watchdog ends a run, `engine.launch.supervisor` requests a record from each rank by signal. A thread of the rank writes
it, because the main thread hangs. Under torchrun and srun, `engine.launch.external_failures` shares the records through
the store. torch's own dumps are pickles, which are never read here.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from engine.utils.codec import (
    FileRecord,
    Meta,
    Record,
    decode,
    encode,
    find_valid_fields,
    parse_object,
)
from engine.utils.files import opened_folder, replace_file

# A signal of its own, because the handler of the traceback signal writes to the log.
DUMP_SIGNAL = signal.SIGRTMIN + 4
# Collectives of each process group in a record. Ranks differ by those of a few steps.
MAX_COLLECTIVES = 200
# A record takes about 150 bytes per collective.
MAX_RECORD_BYTES = 1 << 20
# The time for a rank to write its record, which takes up to 0.4 s on a busy host. One in an uninterruptible call writes
# none.
RECORD_WAIT_SECONDS, POLL_SECONDS = 2.0, 0.02
# Collectives of all process groups in a record.
MAX_RECORDED = 10_000
# Ranks that a message names.
MAX_NAMED_RANKS = 8

_NCCL_BACKENDS = ("nccl", "nccl2")
_ELEMENT_BYTES = {
    **dict.fromkeys(("Bool", "Byte", "Char", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "UInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat", "UInt64"), 8),
}
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,80}\Z")]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]

# Collectives in which the ranks pass tensors of the same size.
_EQUAL_SIZES = ("allreduce", "all_reduce", "broadcast", "reduce", "barrier")


class Collective(Record, frozen=True):
    """A collective that a rank has entered: its process group, its number in that group, and the size of its input.

    `created_ns` is the Unix time at which the rank entered it."""

    group: Name
    sequence: Number
    operation: Name
    size_bytes: Number
    completed: bool
    created_ns: Number

    @property
    def label(self) -> str:
        """The collective in a message, like "all-reduce 57 (4.2 MB)"."""
        name = self.operation.strip("_").replace("_", "-").replace("allreduce", "all-reduce")
        size = f" ({format_megabytes(self.size_bytes)})" if self.size_bytes else ""
        return f"{name} {self.sequence}{size}"

    def matches(self, other: Collective) -> bool:
        """Whether two ranks that entered these two are in the same collective."""
        same_size = self.size_bytes == other.size_bytes or self.operation not in _EQUAL_SIZES
        return self.operation == other.operation and same_size


class CollectiveRecord(FileRecord, frozen=True, kw_only=True):
    """The last collectives of a rank, in the order of its process groups."""

    collectives: Annotated[tuple[Collective, ...], Meta(max_length=MAX_RECORDED)]


@dataclass(frozen=True)
class Divergence:
    """The ranks that are not in the collective of the others, and a clause that says so. No rank: all are in it."""

    ranks: tuple[int, ...]
    message: str


def format_megabytes(size_bytes: int) -> str:
    """Format a size with a decimal unit, as NCCL's tools do."""
    for unit, divisor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= divisor:
            return f"{size_bytes / divisor:.1f} {unit}"
    return f"{size_bytes} B"


# ---- Reading a record ----


def collectives_of_dump(dump: bytes) -> list[Collective]:
    """Return the last collectives of each process group in a JSON dump of torch's flight recorder, in their order."""
    values = parse_object(dump) or {}
    entries = values.get("entries")
    found: dict[str, dict[int, Collective]] = {}
    for entry in entries if isinstance(entries, list) else []:
        with suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
            if not entry["is_p2p"]:
                collective = _from_torch(entry)
                # The entries of one coalesced collective share its number; the last one describes the whole.
                found.setdefault(collective.group, {})[collective.sequence] = collective
    last = (sorted(by_number.items())[-MAX_COLLECTIVES:] for by_number in found.values())
    return [collective for by_number in last for _, collective in by_number]


def _from_torch(entry: dict[str, Any]) -> Collective:
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    size_bytes = sum(
        math.prod(shape) * _ELEMENT_BYTES.get(dtype, 1) for shape, dtype in zip(sizes, dtypes, strict=False)
    )
    # NCCL's work ends as "completed", Gloo's is only retired.
    completed = bool(entry["retired"]) or entry["state"] == "completed"
    backend, _, operation = entry["profiling_name"].partition(":")
    group, sequence, created_ns = entry["process_group"][0], entry["collective_seq_id"], entry["time_created_ns"]
    collective = Collective(f"{backend}:{group}", sequence, operation, size_bytes, completed, created_ns)
    # Checks the types and bounds.
    return decode(encode(collective), Collective)


# ---- Comparing the ranks ----


def find_divergence(records: Mapping[int, Sequence[Collective]]) -> Divergence | None:
    """Return the ranks that are missing in a collective in which other ranks wait; None if the records do not tell.

    `records` maps ranks to their collectives. Ranks without a record are ignored.
    """
    groups: dict[str, dict[int, dict[int, Collective]]] = {}
    for rank, collectives in sorted(records.items()):
        for collective in collectives:
            by_number = groups.setdefault(collective.group, {}).setdefault(rank, {})
            by_number[collective.sequence] = collective
    # A rank waits in what it entered last. The others of its collectives are asynchronous.
    latest_first = sorted(groups.values(), key=_last_created, reverse=True)
    return next((found for by_rank in latest_first if (found := _divergence_of_group(by_rank))), None)


def _last_created(by_rank: Mapping[int, Mapping[int, Collective]]) -> int:
    return max(
        (entry.created_ns for by_number in by_rank.values() for entry in by_number.values() if not entry.completed),
        default=0,
    )


def _divergence_of_group(by_rank: Mapping[int, Mapping[int, Collective]]) -> Divergence | None:
    """Compare the ranks of one process group at each collective that is not complete, in order."""
    pending = sorted(
        {entry.sequence for by_number in by_rank.values() for entry in by_number.values() if not entry.completed}
    )
    common: Divergence | None = None
    for sequence in pending:
        entered = {rank: by_number[sequence] for rank, by_number in by_rank.items() if sequence in by_number}
        if (mismatch := _mismatch(entered)) is not None:
            return mismatch
        absent = [rank for rank, by_number in by_rank.items() if max(by_number) < sequence]
        label = next(iter(entered.values())).label
        if absent:
            waiting = [rank for rank in entered if not entered[rank].completed]
            subject = f"{_ranks(absent)} did not enter {label}"
            return Divergence(tuple(absent), f"{subject}, in which {_ranks(waiting)} {_verb(waiting, 'wait')}")
        if common is None and len(entered) == len(by_rank) > 1:
            common = Divergence((), f"all ranks are in {label}, which does not complete")
    return common


def _mismatch(entered: Mapping[int, Collective]) -> Divergence | None:
    """Return the ranks that are in another collective than most ranks at the same position."""
    kinds = Counter(next(rank for rank in entered if entered[rank].matches(entry)) for entry in entered.values())
    if len(kinds) < 2:
        return None
    (usual_rank, _), *others = kinds.most_common()
    usual = entered[usual_rank]
    odd = [rank for rank in entered if not entered[rank].matches(usual)]
    clauses = []
    for first, _ in others:
        same = [rank for rank in odd if entered[rank].matches(entered[first])]
        clauses.append(f"{_ranks(same)} {_verb(same, 'are')} in {entered[first].label}")
    rest = [rank for rank in entered if rank not in odd]
    return Divergence(tuple(odd), f"{', '.join(clauses)}, but {_ranks(rest)} {_verb(rest, 'are')} in {usual.label}")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
    more = len(ranks) - MAX_NAMED_RANKS
    return f"ranks {named}" + (f" and {more} more" if more > 0 else "")


def _verb(ranks: Sequence[int], plural: str) -> str:
    if len(ranks) > 1:
        return plural
    return "is" if plural == "are" else f"{plural}s"


# ---- A rank records ----


def record_collectives() -> list[Collective]:
    """Return the last collectives of this rank. Empty if torch's flight recorder is off."""
    from torch._C import _distributed_c10d as c10d

    # Gloo records into the first. NCCL does so under the name of its backend, and up to torch 2.14 into the last.
    dumps: list[Callable[[], bytes]] = [c10d._dump_fr_trace_json]
    dumps += [partial(c10d._dump_fr_trace_json, backend=name) for name in _NCCL_BACKENDS]
    if hasattr(c10d, "_dump_nccl_trace_json"):
        dumps.append(c10d._dump_nccl_trace_json)
    collectives: list[Collective] = []
    for dump in dumps:
        # Up to torch 2.14 there are no names of backends.
        with suppress(TypeError):
            collectives += collectives_of_dump(dump())
    return collectives


def record_within(seconds: float) -> list[Collective]:
    """Return the last collectives of this rank; empty if that takes longer, because a call of CUDA hangs."""
    recorded: list[Collective] = []
    thread = threading.Thread(target=lambda: recorded.extend(record_collectives()), daemon=True)
    thread.start()
    thread.join(seconds)
    return list(recorded)


class DumpThread:
    """Thread of a rank that writes a record to `folder` whenever the process receives `DUMP_SIGNAL`.

    Create it in the main thread. A signal before `start` does nothing. `start` it after the DataLoader workers are
    forked, which must not inherit the thread."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / record_name(rank)
        self._thread: threading.Thread | None = None
        signal.signal(DUMP_SIGNAL, lambda *_: None)

    def start(self) -> None:
        """Start the thread once. Call it in the main thread."""
        if self._thread is not None:
            return
        wait_end, signal_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(wait_end, True)
        # Python's signal handlers run in the main thread only; the interpreter writes to this descriptor in any case.
        signal.set_wakeup_fd(signal_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, args=(wait_end,), name="flight recorder", daemon=True)
        self._thread.start()

    def _run(self, wait_end: int) -> None:
        while received := os.read(wait_end, 1):
            if received[0] == DUMP_SIGNAL:
                with suppress(OSError):
                    write_record(self._path, record_collectives())


def record_name(rank: int) -> str:
    """Name of the file with the record of a rank."""
    return f"rank-{rank}.json"


def request_records(folder: Path, pids: Mapping[int, int]) -> dict[int, list[Collective]]:
    """Request a record from each rank with a `DumpThread` on `folder`; return those that arrive in time.

    `pids` maps ranks to their processes. Returns no record if the folder cannot be written to."""
    paths = {rank: folder / record_name(rank) for rank in pids}
    try:
        folder.mkdir(exist_ok=True)
        for path in paths.values():
            path.unlink(missing_ok=True)
    except OSError:
        return {}
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
    deadline = time.monotonic() + RECORD_WAIT_SECONDS
    while not all(path.exists() for path in paths.values()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    records = {rank: read_record(path) for rank, path in paths.items()}
    return {rank: record for rank, record in records.items() if record is not None}


def write_record(path: Path, collectives: Sequence[Collective]) -> None:
    """Write the record of a rank atomically. Raises OSError, also if its folder is a link."""
    with opened_folder(path.parent) as folder:
        data = encode(CollectiveRecord(collectives=tuple(collectives)))
        replace_file(folder / path.name, lambda file: file.write(data))


def read_record(path: Path) -> list[Collective] | None:
    """Return the record of a rank without its invalid entries; None if it is missing, too large or no record."""
    record = find_valid_fields(path, CollectiveRecord, MAX_RECORD_BYTES)
    return None if record is None else list(record.collectives)
