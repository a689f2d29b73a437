"""The readers of files that others may have written, each with valid documents and the functions that gputrain calls.

`fuzz_readers.py` passes them changed and damaged files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers import dataset_file, read_shard, tar_shard, with_right_checksums
from hypothesis import strategies as st
from inputs import damaged, json_files, json_line_files, large_json_files, large_yaml_files, yaml_files
from run_readers import (
    BOTTLENECK,
    EVALUATION,
    EVENT_DOCUMENTS,
    OWNERS,
    SPARSE_EVALUATION,
    SUMMARY,
    read_evaluation,
    read_log,
    read_owner,
    read_requests,
    read_run,
    run_file,
)

from engine.base.codec import MAX_JSON_BYTES, encode
from engine.base.errors import Problem, UsageError
from engine.config.loader import resolve_config
from engine.config.schema import as_dict
from engine.config.yaml_io import parse_yaml, to_yaml
from engine.gpus.reservation import Reservation
from engine.gpus.reservation_reader import read_reservations
from engine.train.data.sources.tar_index import ShardError


@dataclass(frozen=True)
class Reader:
    """A file that `prepare` places below a folder, the `inputs` for it, and the function that reads it as gputrain
    does, which raises only `documented` exceptions. `large` are files that must not take much memory."""

    name: str
    inputs: st.SearchStrategy[bytes]
    prepare: Callable[[Path], Path]
    read: Callable[[Path], None]
    documented: tuple[type[Exception], ...] = ()
    large: Callable[[], Iterator[bytes]] = lambda: large_json_files(MAX_JSON_BYTES)


RESERVATION = {
    "format": 1, "run": "a", "since": 1.0, "selection": "all", "visible": ["GPU-1"],
    "gpus": ["GPU-1"], "ranks": [{"run": "a", "rank": 0, "pid": 8, "uuid": "GPU-1"}], "write_lock": True,
    "priority": 0, "blocked": "", "share": 1, "min_free": 1 << 30, "begin": 5.0,
}  # fmt: skip
_HELD: list[Reservation] = []


def prepare_reservation(root: Path) -> Path:
    os.environ["GPUTRAIN_RESERVATIONS"] = str(root)
    reservation = Reservation()
    reservation.enqueue("all", ["GPU-1"], "a")
    _HELD.append(reservation)
    return next(root.glob("gputrain-*/*.json"))


def _check_printable(problem: Problem) -> None:
    assert str(problem).isprintable()


def read_all_reservations(_: Path) -> None:
    for reservation in read_reservations(report=_check_printable):
        assert reservation.key is not None
        encode(reservation)


def no_large_files() -> Iterator[bytes]:
    yield from ()


CONFIGS: list[Mapping[str, Any]] = [
    as_dict(resolve_config("digits").config),
    {"base": "b.yaml", "model": {"name": "m:Net", "options": {"a": 1}}, "optim": {"betas": [0.9, 0.99]}},
]


def config_file(root: Path) -> Path:
    return root / "a.yaml"


def read_config(root: Path) -> None:
    """An accepted config can be written and read back; a rejected one has a message for each key."""
    try:
        resolved = resolve_config(str(root / "a.yaml"))
    except UsageError as error:
        assert error.problems
        assert all(problem.message for problem in error.problems)
        return
    assert parse_yaml(to_yaml(as_dict(resolved.config)))


READERS = [
    Reader("owner.json", json_files(OWNERS), run_file("owner.json"), read_owner, (UsageError,)),
    Reader("events.jsonl", json_line_files(EVENT_DOCUMENTS), run_file("events.jsonl"), read_run),
    Reader("summary.json", json_files([SUMMARY | {"bottleneck": BOTTLENECK}]), run_file("summary.json"), read_run),
    Reader(
        "control request",
        json_files([{"format": 1, "request": name, "by": "me", "time": 1.0} for name in ("stop", "pause", "x")]),
        run_file("control/1.json"),
        read_requests,
    ),
    Reader(
        "evaluation.json",
        json_files([{"format": 1, "classes": ["a", "b"], "last": EVALUATION, "best": SPARSE_EVALUATION}]),
        run_file("evaluation.json"),
        read_evaluation,
    ),
    Reader("log.txt", st.binary(max_size=200), run_file("log.txt"), read_log),
    Reader("config.yaml", yaml_files(CONFIGS), config_file, read_config, large=large_yaml_files),
    Reader("reservation", json_files([RESERVATION]), prepare_reservation, read_all_reservations),
    Reader(
        "tar shard",
        st.one_of(damaged(tar_shard()), damaged(tar_shard()).map(with_right_checksums)),
        dataset_file,
        read_shard,
        (ShardError,),
        large=no_large_files,
    ),
]
