"""Read runs in MLflow's file store, `mlruns/EXPERIMENT/RUN`.

`metrics/NAME` has a line per value: time in milliseconds, value, and step, which old versions leave out. `params/NAME`
has the value as text, and `meta.yaml` the time of the end. Names may have slashes, which make subfolders. Format:
`FileStore` in
https://github.com/mlflow/mlflow/blob/master/mlflow/store/tracking/file_store.py.
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from engine.base.files import read_bytes
from engine.watch.growing_file import FileFolder, GrowingFile
from engine.watch.mlflow_database import ID_LENGTH
from engine.watch.parameters import MAX_KEY_LENGTH, MAX_PARAMETERS, flatten, parse_scalar
from engine.watch.points import Point
from engine.watch.reading import (
    MAX_METRICS,
    POLL_BYTES,
    Listing,
    Log,
    Reading,
    files_below,
    parse_number,
    to_step,
    to_unix_time,
)

METRICS, PARAMS, META = "metrics", "params", "meta.yaml"
MAX_PARAM_BYTES = 1 << 14  # MLflow allows 6000 characters
MAX_DEPTH = 6
_END_TIME = re.compile(rb"^end_time: [1-9]", re.MULTILINE)


def find(listing: Listing) -> list[Log]:
    """Return the log of a run's folder in a file store."""
    if META not in listing.files or METRICS not in listing.folders:
        return []
    folder = listing.folder
    owned = (METRICS, PARAMS, "tags")

    def list_files() -> list[Path]:
        return [path for _, path in islice(files_below(folder / METRICS, MAX_DEPTH), MAX_METRICS)]

    if not (files := tuple(list_files())):
        return []
    name = _name_of(folder)
    return [Log("mlflow", files, lambda: MlflowRun(folder), owned_folders=owned, list_files=list_files, name=name)]


def _name_of(folder: Path) -> str:
    """Return the name that the user gave a run, below the one of its parent; "" without any."""
    if not (name := _read_tag(folder, "mlflow.runName")):
        return ""
    parent = _read_tag(folder, "mlflow.parentRunId")
    above = _read_tag(folder.parent / parent, "mlflow.runName") if parent.isalnum() else ""
    label = f"{name.replace('/', '-')}-{folder.name[:ID_LENGTH]}"
    return f"{above.replace('/', '-')}/{label}" if above else label


def _read_tag(folder: Path, name: str) -> str:
    try:
        return read_bytes(folder / "tags" / name, MAX_PARAM_BYTES).decode(errors="replace").strip()[:MAX_KEY_LENGTH]
    except OSError:
        return ""


class MlflowRun(FileFolder):
    """Follows the files of one run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._params: set[str] = set()

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read the complete lines of at most about `max_bytes`, and the parameters that are new."""
        reading = super().poll(max_bytes)
        reading.parameters, reading.has_ended = self._new_parameters(), _has_end_time(self._folder / META)
        return reading

    def add_files(self) -> None:
        for name, path in islice(files_below(self._folder / METRICS, MAX_DEPTH), MAX_METRICS):
            if path not in self._files and (known := self._names.get(name)) is not None:
                self._files[path] = _MetricFile(known, path)

    def _new_parameters(self) -> dict[str, bool | int | float | str | None]:
        found = {}
        for name, path in islice(files_below(self._folder / PARAMS, MAX_DEPTH), MAX_PARAMETERS):
            if name in self._params or len(name) > MAX_KEY_LENGTH:
                continue
            try:
                text = read_bytes(path, MAX_PARAM_BYTES).decode(errors="replace")
            except OSError:
                continue
            if text:
                self._params.add(name)
                found[name] = parse_scalar(text.strip())
        return flatten(found)


def _has_end_time(path: Path) -> bool:
    """Whether the `meta.yaml` of a run says when it ended: `end_time: 1795795510000`, or `null` before."""
    try:
        return _END_TIME.search(read_bytes(path, MAX_PARAM_BYTES)) is not None
    except OSError:
        return False


class _MetricFile:
    """The file of one metric, see `FolderFile`."""

    is_held = False

    def __init__(self, name: str, path: Path) -> None:
        self._name, self.file = name, GrowingFile(path)
        self._num_rows = 0
        self.problem: str | None = None

    def poll(self, max_bytes: int, reading: Reading) -> tuple[int, bool]:
        with self.file.opened() as was_replaced:
            if was_replaced or max_bytes <= 0:
                return 0, was_replaced
            before = self.file.offset
            for line in self.file.read_lines(max_bytes):
                self._read_line(line, reading)
            return self.file.offset - before, False

    def _read_line(self, line: bytes, reading: Reading) -> None:
        parts = [parse_number(part) for part in line.decode(errors="replace").split(" ")]
        if not 2 <= len(parts) <= 3 or (value := parts[1]) is None:
            self.problem = f"{self.file.path.name} has a damaged line"
            return
        step = to_step(parts[2]) if len(parts) == 3 else self._num_rows
        time_ms = parts[0]
        self._num_rows += 1
        if step is not None:
            time = to_unix_time(time_ms / 1000) if time_ms is not None else None
            reading.points.append(Point(self._name, step, value, None, time))
