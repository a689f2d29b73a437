"""Send one message to its destinations through apprise, and tell why one did not take it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.notify.destinations import Destination, read_destinations
from engine.notify.message import Message
from engine.utils.errors import not_installed
from engine.utils.text import printable

MAX_REASON_CHARS = 200
# Shorter parts of a URL are not secrets, and would blank out half of an error message.
MIN_SECRET_CHARS = 3
# A host name is shown. The token that many services have in its place contains no dot.
_HOST_NAME = re.compile(r"localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")


@dataclass(frozen=True)
class Delivery:
    """What became of a message at one destination.

    `label` names the destination, or says why it cannot be read. `service` is its kind and host, "" if unknown.
    `reason` is why it was not sent, and `code` the kind of that problem.
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
    found = read_destinations(references)
    deliveries = [Delivery(str(problem), sent=False, code=problem.code) for problem in found.problems]
    return deliveries + [_send(destination, message) for destination in found.found]


def _send(destination: Destination, message: Message) -> Delivery:
    """Send a message to one destination."""
    label, url = destination.label, destination.url
    try:
        import apprise
    except ImportError:
        return Delivery(label, sent=False, reason=not_installed("apprise"), code="not-installed")
    if "template=" in url.partition("?")[2].lower():
        reason = "the URL must not name a template, which is a local file"
        return Delivery(label, sent=False, reason=reason, code="not-supported")
    service = ""
    with _warnings_of_apprise() as warnings:
        try:
            # No plug-ins of the user, and nothing is written to disk.
            asset = apprise.AppriseAsset(app_id="gputrain", app_desc="gputrain", async_mode=False)
            # Unlike Apprise.add, it accepts one URL of a service only: no list, and no config file.
            plugin = apprise.Apprise.instantiate(url, asset=asset)
            if plugin is None:
                reason = "apprise does not know this service, or its URL is incomplete"
                return Delivery(label, sent=False, reason=reason, code="invalid-value")
            service = describe_service(plugin)
            sender = apprise.Apprise(asset=asset)
            sender.add(plugin)
            # apprise 1.9.0 has a class of strings, later releases an enumeration.
            level = getattr(apprise.NotifyType, message.level.upper())
            text = apprise.NotifyFormat.TEXT
            if sender.notify(body=message.body, title=message.title, notify_type=level, body_format=text):
                return Delivery(label, sent=True, service=service)
            reason = warnings[-1] if warnings else "apprise reports no reason"
        except Exception as error:
            # A plug-in of apprise may raise anything; a message must not end the run.
            reason = f"{type(error).__name__}: {error}"
    return Delivery(label, False, service, redact(reason, url)[:MAX_REASON_CHARS], "connection-failed")


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


def describe_service(plugin: Any) -> str:
    """Return name and host of a service, without the tokens that many services have in place of a host."""
    host = str(getattr(plugin, "host", "") or "")
    has_host = any("{host}" in template for template in plugin.templates)
    shown = f" at {host}" if has_host and _HOST_NAME.fullmatch(host) else ""
    return printable(f"{plugin.service_name}{shown}")


def redact(text: str, url: str) -> str:
    """Return the text without the parts of a URL that may be secret, in one line."""
    from urllib.parse import unquote

    scheme, _, rest = url.partition("://")
    split = re.split(r"[/:@?&=,+;#\s]+", rest)
    parts = {*split, *map(unquote, split)}
    secrets = {part for part in parts if len(part) >= MIN_SECRET_CHARS and _HOST_NAME.fullmatch(part) is None}
    text = text.replace(url, f"{scheme}://…")
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "…")
    return printable(" ".join(text.split()))
