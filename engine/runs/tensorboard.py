"""The curves of a run as TensorBoard reads them: `loss`, `accuracy` and `learning_rate` by epoch, one series of each
for training and for validation where both exist."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from engine.runs.events import EpochEvent


class TensorBoardWriter:
    """Writes below `folder/train` and `folder/val`. The writers are made with the first epoch: importing them earlier
    would take a core from the ranks while they start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def write(self, epoch: EpochEvent) -> None:
        """Raises OSError."""
        self._write("train", epoch, loss=epoch.train_loss, accuracy=epoch.train_accuracy, learning_rate=epoch.lr)
        self._write("val", epoch, loss=epoch.val_loss, accuracy=epoch.val_accuracy, top5=epoch.val_top5)
        if epoch.ema_val_accuracy is not None and math.isfinite(epoch.ema_val_accuracy):
            self._write("ema", epoch, loss=epoch.ema_val_loss, accuracy=epoch.ema_val_accuracy)

    def _write(self, series: str, epoch: EpochEvent, **values: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if series not in self._writers:
            self._writers[series] = EventFileWriter(str(self._folder / series))
            # What an earlier session wrote of this epoch and later ones no longer holds.
            restart = SessionLog(status=SessionLog.START)
            self._writers[series].add_event(
                TensorBoardEvent(wall_time=epoch.time, step=epoch.epoch, session_log=restart)
            )
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writers[series].add_event(TensorBoardEvent(wall_time=epoch.time, step=epoch.epoch, summary=summary))
        self._writers[series].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
