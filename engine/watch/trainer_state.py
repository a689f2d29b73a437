"""Read the log history of Hugging Face's `Trainer`: `trainer_state.json` in its folder and in each checkpoint.

`TrainerState.save_to_json` of transformers writes one object. Its `log_history` is a list of objects, each with `step`,
`epoch` and the metrics of that step. Each checkpoint repeats the history, so that the newest file has all of it. The
list is decoded entry by entry: a history of a million entries has 200 MB.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
from functools import partial
from itertools import islice
from pathlib import Path

from engine.base.files import open_regular_file
from engine.watch.growing_file import GrowingFile
from engine.watch.reading import (
    POLL_BYTES,
    Columns,
    Listing,
    Log,
    MetricNames,
    Reading,
    flat_numbers,
    list_folder,
    parse_json_object,
    row_points,
)

STATE_FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")
_HISTORY = re.compile(rb'"log_history"\s*:\s*\[')
_HISTORY_END = re.compile(rb"\]\s*,(?=\s*\")")
MAX_LIST_ENDS = 20
# Crashes during a save leave checkpoints without a state.
MAX_UNFINISHED = 20
_SEPARATORS = re.compile(r"[\s,]*")
MAX_ENTRY_BYTES = 1 << 18
MAX_EDGE_BYTES = 1 << 18  # before and after the history
_DECODER = json.JSONDecoder()


def find(listing: Listing) -> list[Log]:
    """Return the log of a folder with a `trainer_state.json`, or with a checkpoint that has one."""
    checkpoints = tuple(name for name in listing.folders if _CHECKPOINT.fullmatch(name))
    folder = listing.folder
    files = _checkpoint_states(listing)
    files += [folder / STATE_FILE] if STATE_FILE in listing.files else []
    if not files:
        return []

    def list_files() -> list[Path]:
        newest_path, _ = newest_state(list_folder(folder))
        return [newest_path] if newest_path is not None else []

    source = partial(TrainerStates, folder)
    return [Log("trainer-state", tuple(files), source, owned_folders=checkpoints, list_files=list_files)]


def _checkpoint_states(listing: Listing) -> list[Path]:
    """Return the state of the newest checkpoint that has one: while a checkpoint is saved, it has none yet."""
    checkpoints = (name for name in listing.folders if _CHECKPOINT.fullmatch(name))
    newest = heapq.nlargest(MAX_UNFINISHED, checkpoints, key=_checkpoint_step)
    states = (listing.folder / name / STATE_FILE for name in newest)
    return list(islice((path for path in states if os.path.lexists(path)), 1))


def _checkpoint_step(name: str) -> int:
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else -1


def newest_state(listing: Listing) -> tuple[Path | None, tuple[int, int, int]]:
    """Return the state that was written last in a folder or its last checkpoint, and its time, size and inode."""
    stamps = []
    for path in (listing.folder / STATE_FILE, *_checkpoint_states(listing)):
        try:
            status = path.lstat()
        except OSError:
            continue
        stamps.append(((status.st_mtime_ns, status.st_size, status.st_ino), path))
    stamp, newest_path = max(stamps, default=((0, 0, 0), None))
    return newest_path, stamp


def read_state_scalars(path: Path) -> dict[str, bool | int | float | str]:
    """Return the scalars of a state, such as `max_steps`. Its history, however long, is not read. Raises OSError."""
    with open_regular_file(path) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        head = os.pread(fd, MAX_EDGE_BYTES, 0)
        history = _HISTORY.search(head)
        if history is None:
            values = parse_json_object(head) or {}
        else:
            values = parse_json_object(head[: history.start()].rstrip(b", \n\r\t") + b"}") or {}
            tail = os.pread(fd, MAX_EDGE_BYTES, max(history.end(), size - MAX_EDGE_BYTES))
            # The last list that is followed by the rest of the object is the history.
            ends = list(_HISTORY_END.finditer(tail))[-MAX_LIST_ENDS:]
            rests = (parse_json_object(b"{" + tail[end.end() :]) for end in reversed(ends))
            values |= next((rest for rest in rests if rest is not None), {})
    return {key: value for key, value in values.items() if isinstance(value, bool | int | float | str)}


class TrainerStates:
    """Follows the newest `trainer_state.json` of a folder and its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._stamp = (0, 0, 0)
        self._file = GrowingFile(folder / STATE_FILE)
        self._names = MetricNames()
        self._is_in_history = self._is_done = False

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read at most about `max_bytes` of the history. A newer file is read from its beginning."""
        reading = Reading()
        path, stamp = newest_state(list_folder(self._folder))
        if path is None:
            return reading
        if (path, stamp) != (self._path, self._stamp):
            if self._path is not None:
                reading.drop_from = -math.inf
            self._path, self._stamp, self._file = path, stamp, GrowingFile(path)
            self._is_in_history = self._is_done = False
        try:
            with self._file.opened() as was_replaced:
                if was_replaced:
                    reading.drop_from, self._is_in_history = -math.inf, False
                if not self._is_done:
                    self._read_history(max_bytes, reading)
        except OSError as error:
            reading.problem = f"{path.name} cannot be read: {error.strerror}"
        reading.read_bytes, reading.total_bytes = self._file.offset, self._file.size
        if self._is_done:
            reading.read_bytes = reading.total_bytes
        reading.problem = reading.problem or self._names.problem
        return reading

    def _read_history(self, max_bytes: int, reading: Reading) -> None:
        data = self._file.read(max(max_bytes, 2 * MAX_ENTRY_BYTES))
        is_rest = len(data) == self._file.unread_bytes
        start = 0
        if not self._is_in_history:
            match = _HISTORY.search(data)
            if match is None:
                # The key may lie across the end of the data.
                self._file.offset += len(data) if is_rest else len(data) - MAX_ENTRY_BYTES
                self._is_done = is_rest
                return
            self._is_in_history, start = True, match.end()
        text = data[start:].decode("latin-1")  # one character per byte, so that positions are those of the file
        position = _after_separators(text, 0)
        while text[position : position + 1] == "{":
            try:
                entry, position = _DECODER.raw_decode(text, position)
            except (ValueError, RecursionError):
                break
            row = flat_numbers(entry)
            reading.points.extend(row_points(row, Columns.find(row), 0, self._names))
            position = _after_separators(text, position)
        is_torn = is_rest or len(text) - position > MAX_ENTRY_BYTES
        self._is_done = text[position : position + 1] == "]" or is_torn
        if self._is_done and text[position : position + 1] != "]":
            reading.problem = f"{STATE_FILE} is damaged or incomplete"
        self._file.offset += start + position


def _after_separators(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    return match.end() if match else position
