"""Send one message to its destinations through apprise, and tell why one did not take it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote

from engine.notify.destinations import Destination, read_destinations
from engine.notify.message import Message
from engine.runs.folder import RunFolder
from engine.utils.errors import not_installed
from engine.utils.files import append_to_file
from engine.utils.text import printable

MAX_REASON_CHARS = 200
MAX_LOG_BYTES = 1 << 18
# Of these services of apprise, the host says which one it is, and is no secret.
WEB_HOOKS = ("JSON", "XML", "Form")
# Shorter parts of a URL are not secrets, and would blank out half of an error message.
MIN_SECRET_CHARS = 3


@dataclass(frozen=True)
class Delivery:
    """What became of a message at one destination.

    `label` names the destination, or says why it cannot be read. `service` is its kind, "" if unknown. `reason` is why
    it was not sent, and `code` the kind of that problem.
    """

    label: str
    sent: bool
    service: str = ""
    reason: str = ""
    code: str = ""

    @property
    def line(self) -> str:
        """The delivery as one line of text."""
        name = f"{self.label} ({self.service})" if self.service else self.label
        outcome = "sent" if self.sent else self.reason
        return f"{name}: {outcome}" if outcome else name


def send_message(message: Message, references: Iterable[str]) -> list[Delivery]:
    """Send a message to all destinations, and return what became of it.

    Destinations that cannot be read are among them, with the reason. The time limits are those of apprise."""
    found, problems = read_destinations(references)
    deliveries = [Delivery(str(problem), sent=False, code=problem.code) for problem in problems]
    return deliveries + [_send(destination, message) for destination in found]


def _send(destination: Destination, message: Message) -> Delivery:
    """Send a message to one destination. A plug-in of apprise may raise anything, which must not end the run."""
    label, url = destination
    try:
        import apprise
    except ImportError:
        return Delivery(label, sent=False, reason=not_installed("apprise"), code="not-installed")
    # apprise decodes the names of options before it reads them, so `Temp%6Cate=` names a template.
    if "template=" in unquote(url).partition("?")[2].lower():
        reason = "the URL must not name a template, which is a local file"
        return Delivery(label, sent=False, reason=reason, code="not-supported")
    service = ""
    with _warnings_of_apprise() as warnings:
        try:
            # No plug-ins of the user, and nothing is written to disk.
            asset = apprise.AppriseAsset(app_id="gputrain", app_desc="gputrain", async_mode=False)
            sender = apprise.Apprise(asset=asset)
            if not sender.add(url):
                reason = "apprise does not know this service, or its URL is incomplete"
                return Delivery(label, sent=False, reason=reason, code="invalid-value")
            service = printable(str(sender[0].service_name))
            service += f" at {printable(sender[0].host)}" if service in WEB_HOOKS else ""
            # apprise 1.9.0 has a class of strings, later releases an enumeration.
            level = getattr(apprise.NotifyType, message.level.upper())
            text = apprise.NotifyFormat.TEXT
            if sender.notify(body=message.body, title=message.title, notify_type=level, body_format=text):
                return Delivery(label, sent=True, service=service)
        except Exception as error:
            warnings.append(f"{type(error).__name__}: {error}")
    reason = redact((warnings or ["apprise reports no reason"])[-1], url)[:MAX_REASON_CHARS]
    return Delivery(label, False, service, reason, "connection-failed")


@contextmanager
def _warnings_of_apprise() -> Iterator[list[str]]:
    """Yield the warnings that apprise logs meanwhile: its calls return no reason."""
    warnings: list[str] = []
    log, handler = logging.getLogger("apprise"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.propagate = False
    try:
        yield warnings
    finally:
        log.removeHandler(handler)


def redact(text: str, url: str) -> str:
    """Return the text without the parts of a URL that may be secret, in one line."""
    parts = {*re.split(r"\W+", url), *re.split(r"\W+", unquote(url))}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= MIN_SECRET_CHARS:
            text = text.replace(part, "…")
    return printable(" ".join(text.split()))


def send_logged(folder: RunFolder, message: Message, references: Sequence[str]) -> None:
    """Send a message, and append what became of it to `notify.log` of the run, which only this user can read."""
    for delivery in send_message(message, references):
        line = printable(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message.occasion}: {delivery.line}")
        with suppress(OSError):
            handle = append_to_file(folder.notify_log)
            try:
                os.fchmod(handle, 0o600)
                if os.fstat(handle).st_size < MAX_LOG_BYTES:
                    os.write(handle, f"{line}\n".encode())
            finally:
                os.close(handle)
