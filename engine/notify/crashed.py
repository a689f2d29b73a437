"""Send the message that a run has crashed: `python -m engine.notify.crashed FOLDER`.

`engine.runs.record_completion` starts it once, when somebody opens a run whose owner has left its record behind.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from engine.config.loader import resolve_config
from engine.notify.message import make_message
from engine.notify.run_messages import is_notified
from engine.notify.sender import send_logged
from engine.runs.folder import RunFolder, RunState
from engine.runs.record_completion import open_run
from engine.runs.run_row import state_message

WITHOUT_CHECKPOINT = "supervisor exited unexpectedly; there is no checkpoint to resume from"


def main(path: Path) -> None:
    """Send the message about the run in a folder, unless its config wants none."""
    folder = RunFolder(path)
    config, (record, state) = resolve_config(str(folder.config)).config, open_run(folder)
    if state is not RunState.CRASHED or "crashed" not in config.notify.when or not is_notified(config):
        return
    sentence = state_message(record, state) if folder.resumable else WITHOUT_CHECKPOINT
    message = make_message(
        "crashed", sentence, record.host or socket.gethostname(), path, record, resumable=folder.resumable
    )
    send_logged(folder, message, config.notify.urls)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
