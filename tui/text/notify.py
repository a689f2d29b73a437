"""Output of `gputrain notify test`: one line per destination, without its URL."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict

from engine.notify.destinations import user_file
from engine.notify.message import test_message
from engine.notify.sender import send_message
from engine.utils.errors import UsageError
from engine.utils.text import printable


def send_test(urls: Sequence[str], *, as_json: bool) -> int:
    """Send the test message, print what became of it, and return the exit code.

    Raises UsageError if there is no destination.
    """
    deliveries = send_message(test_message(socket.gethostname()), urls)
    if not deliveries:
        advice = f"set notify.urls=env:NAME, or write URLs into {user_file()} (chmod 600)"
        raise UsageError.one("notify.urls", "there is no destination", advice, code="missing-value")
    if as_json:
        print(json.dumps([asdict(delivery) for delivery in deliveries], indent=2))
    else:
        for delivery in deliveries:
            print(printable(delivery.line), file=sys.stdout if delivery.sent else sys.stderr)
    return 0 if all(delivery.sent for delivery in deliveries) else 1
