"""Write the metrics of each epoch as TensorBoard event files: `loss`, `accuracy`, `learning_rate`, `gradient_norm` (of
the latest step event) and `top5`; and the loss of each step, with the learning rate of each step event.

`engine.runs.recorder` calls it after each step event and epoch. Training, validation and EMA metrics are separate
TensorBoard runs, whose steps are epochs. Those of the run `steps` are optimizer steps.
`engine.base.event_file` encodes the records.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from engine.base.event_file import scalars_record, session_start_record, version_record
from engine.base.files import append_to_file
from engine.runs.events import EpochEvent, StepEvent
from engine.runs.records import Scores

# Events that wait while the files cannot be written. With 2 steps per second and 10 steps per event, 14 hours of them.
MAX_WAITING_STEP_EVENTS = 10_000
# Tags of the quantities of a step that have another key in the registry.
TAGS = {"grad_norm": "gradient_norm"}


class TensorBoardWriter:
    """Writes to `folder/train`, `folder/val`, `folder/steps` and, for the EMA weights, `folder/ema`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _EventFile] = {}
        self._written_step = 0
        self._steps: deque[StepEvent] = deque(maxlen=MAX_WAITING_STEP_EVENTS)
        self._file_numbers = count()

    def restart(self, from_step: int) -> None:
        """Begin a session, which trains again what follows `from_step`."""
        self.close()
        self._written_step = from_step
        self._steps.clear()

    def add_step(self, event: StepEvent) -> None:
        """Add a step event, which the next `write` writes. While the disk is full, the latest of them are kept."""
        self._steps.append(event)

    def write(self, epochs: Sequence[EpochEvent], latest_step: StepEvent | None) -> None:
        """Write the added steps, and the metrics of all `epochs` of the run that are not written yet, of the last one
        with `latest_step`.

        Raises OSError, after which the next call begins new files, because a record may be incomplete.
        """
        due = [epoch for epoch in epochs if epoch.step > self._written_step]
        try:
            while self._steps:
                self._write_steps(self._steps[0])
                self._steps.popleft()
            for epoch in due:
                self._write_epoch(epoch, latest_step if epoch is epochs[-1] else None)
                self._written_step = epoch.step
        except BaseException:
            self.close()
            raise

    def _write_epoch(self, epoch: EpochEvent, latest_step: StepEvent | None) -> None:
        train = {"loss": epoch.train_loss, "accuracy": epoch.train_accuracy, "learning_rate": epoch.lr}
        for key, value in (latest_step.quantities if latest_step is not None else {}).items():
            train[TAGS.get(key, key)] = value
        self._write("train", epoch.time, epoch.epoch, [train])
        self._write("val", epoch.time, epoch.epoch, [_values(epoch.val)])
        if epoch.ema is not None:
            self._write("ema", epoch.time, epoch.epoch, [_values(epoch.ema)])
        elif "ema" not in self._files and (self._folder / "ema").is_dir():
            # A session without EMA drops what an earlier one wrote of the EMA for the epochs that it repeats.
            self._write("ema", epoch.time, epoch.epoch, [{}])

    def _write_steps(self, event: StepEvent) -> None:
        values: list[dict[str, float | None]] = [{"loss": loss} for loss in event.losses]
        if values:
            values[-1]["learning_rate"] = event.lr
            self._write("steps", event.time, event.step - len(values) + 1, values)

    def _write(self, series: str, time: float, step: int, values: Sequence[Mapping[str, float | None]]) -> None:
        """Append the values of consecutive steps. The first one is `step`."""
        records = []
        if series not in self._files:
            self._files[series] = _EventFile(self._folder / series, next(self._file_numbers))
            records += [version_record(time), session_start_record(time, step)]
        for number, of_step in enumerate(values, start=step):
            # A journal stores a number that is not finite as null.
            scalars = {tag: math.nan if value is None else value for tag, value in of_step.items()}
            records.append(scalars_record(time, number, scalars))
        self._files[series].write(b"".join(records))

    def close(self) -> None:
        """Close all files. Raises OSError."""
        files = list(self._files.values())
        self._files.clear()
        for file in files:
            file.close()


def _values(scores: Scores) -> dict[str, float | None]:
    own = {f"metrics/{name}": value for name, value in scores.metrics.items()}
    return {"loss": scores.loss, "accuracy": scores.accuracy, "top5": scores.top5} | own


class _EventFile:
    """One new event file. TensorBoard's own writer has a thread that dies, with a traceback, if a write fails."""

    def __init__(self, folder: Path, number: int) -> None:
        """Create the file. Raises OSError."""
        # Not the run folder, which may have been moved or deleted.
        for each in (folder.parent, folder):
            each.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._fd = append_to_file(folder / name)

    def write(self, records: bytes) -> None:
        """Append whole records. Raises OSError if only a part of them is written."""
        if os.write(self._fd, records) != len(records):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        os.close(self._fd)
