"""Send the message that waiting runs are held, from the supervisor of one of them: it has no watcher yet."""

from __future__ import annotations

import shlex
import socket
import threading

from engine.config.schema import Config
from engine.notify.message import make_end_message
from engine.notify.outbox import NotifyLog
from engine.notify.start import is_notified
from engine.runs.folder import RunFolder
from engine.utils.files import shown_path


def send_held(folder: RunFolder, config: Config, reason: str) -> None:
    """Send why a run and the rest of its batch are held, unless the user wants no such message. Does not block."""
    if "held" not in config.notify.when or not is_notified(config):
        return
    path = shown_path(folder.root)
    command = f"gputrain queue release {shlex.quote(path.name)} --runs-dir {shlex.quote(str(path.parent))}"
    lines = [reason, f"start the rest with: {command}"]
    message = make_end_message("held", f"the batch of {path.name}", socket.gethostname(), lines)

    def send() -> None:
        from engine.notify.sender import send_message

        log = NotifyLog(folder)
        for delivery in send_message(message, config.notify.urls, in_background=True):
            log.write(f"{message.occasion}: {delivery.line}")

    # It waits for the network, and the place in the queue must be kept alive meanwhile.
    threading.Thread(target=send, name="held-message", daemon=True).start()
