"""Messages of a sweep (config section `notify`): one at its end. Its trials send none about how they end.

`controller` calls both functions.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from engine.config.notify_section import Occasion
from engine.config.schema import Config
from engine.notify.message import make_end_message
from engine.notify.run_messages import is_notified
from engine.notify.sender import send_message
from engine.sweeps.folder import SweepFolder
from engine.utils.errors import Problem
from engine.utils.exit_codes import ExitCode

# What a trial of a sweep reports by itself: forty trials would send forty messages about their ends.
TRIAL_OCCASIONS = ("crashed", "stalled", "slowed")


def trial_override(config: Config) -> str:
    """Return the override that restricts the messages of a trial."""
    return f"notify.when=[{','.join(item for item in config.notify.when if item in TRIAL_OCCASIONS)}]"


def send_end(folder: SweepFolder, config: Config, code: ExitCode, lines: Sequence[str]) -> list[Problem]:
    """Send the message about the end of a sweep, whose last log `lines` say how it went. Return why it was not sent."""
    ends: dict[ExitCode, Occasion] = {ExitCode.FINISHED: "finished", ExitCode.STOPPED: "stopped"}
    occasion = ends.get(code, "failed")
    if occasion not in config.notify.when or not is_notified(config):
        return []
    message = make_end_message(occasion, f"sweep {folder.name}", socket.gethostname(), lines)
    deliveries = send_message(message, config.notify.urls)
    return [
        Problem("", f"no message was sent: {delivery.line}", code=delivery.code)
        for delivery in deliveries
        if not delivery.sent
    ]
