"""Write the metrics of each epoch as TensorBoard event files: `loss`, `accuracy`, `learning_rate`, `gradient_norm` (of
the latest step event) and `top5`.

`engine.runs.recorder` calls it after each epoch. Training, validation and EMA metrics are separate TensorBoard runs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from engine.runs.events import EpochEvent, StepEvent


class TensorBoardWriter:
    """Writes to `folder/train`, `folder/val` and `folder/ema`.

    TensorBoard is imported with the first epoch, because the import would slow down the start of the ranks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def write(self, epoch: EpochEvent, latest_step: StepEvent | None) -> None:
        """Write the metrics of one epoch. Raises OSError."""
        norm = {"gradient_norm": latest_step.grad_norm} if latest_step is not None else {}
        train = {"loss": epoch.train_loss, "accuracy": epoch.train_accuracy, "learning_rate": epoch.lr, **norm}
        self._write("train", epoch, **train)
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
            # SessionLog.START makes TensorBoard drop what an earlier session wrote for this epoch and later ones.
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
