"""Read the log history of Hugging Face's `Trainer`: `trainer_state.json` in its folder and in each checkpoint.

`TrainerState.save_to_json` of transformers writes one object. Its `log_history` is a list of objects, each with `step`,
`epoch` and the metrics of that step. Each checkpoint repeats the history, so that the newest file has all of it.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from engine.base.files import find_file_stamp, read_bytes
from engine.watch.json_file import MAX_FILE_BYTES, JsonFile, closed
from engine.watch.parameters import Parameters, flatten
from engine.watch.reading import Listing, Log, Reading, flat_numbers, list_folder, parse_json_object

STATE_FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")
# Crashes during a save leave checkpoints without a state.
MAX_UNFINISHED = 20


def find(listing: Listing) -> list[Log]:
    """Return the log of a folder with a `trainer_state.json`, or with a checkpoint that has one."""
    checkpoints = tuple(name for name in listing.folders if _CHECKPOINT.fullmatch(name))
    folder = listing.folder
    files = _checkpoint_states(listing)
    files += [folder / STATE_FILE] if STATE_FILE in listing.files else []
    if not files:
        return []
    source = partial(TrainerStates, folder)
    list_files = partial(_newest_state, folder)
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


def _newest_state(folder: Path) -> list[Path]:
    """Return the state that was written last, in a folder or its last checkpoint; none without one."""
    paths = [folder / STATE_FILE, *_checkpoint_states(list_folder(folder))]
    stamps = [(stamp[::-1], path) for path in paths if (stamp := find_file_stamp(path)) is not None]
    return [max(stamps)[1]] if stamps else []


def state_parameters(path: Path) -> Parameters:
    """Return the scalars of a `trainer_state.json`, such as `max_steps`; none of another file."""
    if path.name != STATE_FILE:
        return {}
    with suppress(OSError):
        return _scalars(parse_json_object(read_bytes(path, MAX_FILE_BYTES)) or {})
    return {}


def _scalars(state: Mapping[str, Any]) -> Parameters:
    return flatten({key: value for key, value in state.items() if isinstance(value, bool | int | float | str)})


class TrainerStates(JsonFile):
    """Follows the newest `trainer_state.json` of a folder and its checkpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / STATE_FILE)

    def _paths(self) -> list[Path]:
        return _newest_state(self._path.parent)

    def _rows(self, path: Path, data: bytes, reading: Reading) -> list[dict[str, float]]:
        """Return the history, and read what else the state has, such as `max_steps`."""
        state = parse_json_object(data)
        if state is None:
            self._problem = f"{path.name} is damaged or incomplete"
            state = parse_json_object(closed(data.decode(errors="replace"))) or {}
        reading.parameters |= _scalars(state)
        history = state.get("log_history")
        return [flat_numbers(row) for row in history if isinstance(row, dict)] if isinstance(history, list) else []
