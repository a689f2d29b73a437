"""Record a run: each event goes to the journal, the log, TensorBoard and the summary.

The supervisor uses it; under torchrun and srun, rank 0 does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from engine.config.schema import Config, as_stored
from engine.config.yaml_io import to_yaml
from engine.runs.event_lines import event_lines
from engine.runs.events import EpochEvent, Event, FlushJournal, RankFailed, RunFinished, RunStarted, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import Journal
from engine.runs.tensorboard import TensorBoardWriter
from engine.utils.files import append_to_file, replace_file, write_json
from engine.utils.text import printable

Listener = Callable[[Event], None]


class Recorder:
    """Writes every event of a run to its folder and passes it to the listener.

    If the disk is full, training continues; the listener receives one warning.
    """

    def __init__(self, folder: RunFolder, config: Config, listener: Listener) -> None:
        """Open the files of the run folder. Raises OSError if it cannot be written to."""
        self.folder = folder
        self.history = folder.history()
        self._listener = listener
        folder.control.mkdir(exist_ok=True)
        folder.checkpoints.mkdir(exist_ok=True)
        self._config = config
        if not folder.config.exists():
            self._write_config()
        self._journal = Journal(folder.journal)
        self._log = append_to_file(folder.log)
        self._tensorboard = TensorBoardWriter(folder.tensorboard)
        self._disk_full = False
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def record(self, event: Event, *, notify: bool = True) -> None:
        """Record one event; ignored after `close`. Safe to call from any thread.

        Without `notify`, the event is not passed to the listener, which has received it before.
        """
        with self._lock:
            if not self.closed.is_set():
                self._record(event, self._listener if notify else lambda _: None)

    def set_listener(self, listener: Listener) -> None:
        self._listener = listener

    def show(self, event: Event) -> None:
        """Pass an event to the listener without recording it."""
        self._listener(event)

    def _record(self, event: Event, listener: Listener) -> None:
        if isinstance(event, FlushJournal):
            with suppress(OSError):
                self._journal.sync()
            return
        self.history.add(event)
        try:
            self._journal.append(event)
            for line in event_lines(event, self.history):
                stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
                os.write(self._log, f"{stamp}  {line}\n".encode())
            if isinstance(event, RankFailed):
                os.write(self._log, "".join(f"{printable(row)}\n" for row in event.traceback.splitlines()).encode())
            if isinstance(event, RunStarted):
                # Not earlier, because a resume that fails during setup must leave the run unchanged.
                self._write_config()
            if isinstance(event, EpochEvent):
                self._tensorboard.write(event, self.history.latest_step)
            if isinstance(event, EpochEvent | RunFinished):
                self._journal.sync()
                write_json(self.folder.summary, self.history.summary().to_dict())
        except OSError as error:
            if not self._disk_full:
                self._disk_full = True
                message = (
                    f"the run folder cannot be written to ({error.strerror}); training continues, but its journal and "
                    "log will be incomplete"
                )
                self._listener(WarningEvent(message=message))
        listener(event)

    def set_config(self, config: Config) -> None:
        """Set the config that is written when training starts: the ranks may use other values than were requested."""
        self._config = config

    def _write_config(self) -> None:
        text = to_yaml(as_stored(self._config))
        replace_file(self.folder.config, lambda file: file.write(text.encode()), durable=True)

    def close(self) -> None:
        with self._lock:
            self.closed.set()
        with suppress(OSError):
            self._tensorboard.close()
        self._journal.close()
        os.close(self._log)
