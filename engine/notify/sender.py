"""Send one message to its destinations through apprise, in a short-lived helper process.

`send_message` is the caller's side: the watcher and `gputrain doctor --send-test-message` call it. A destination that
hangs costs the time limit and no more: the process is killed with all its threads, and holds no memory between
messages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.notify.destinations import Destination, read_destinations
from engine.notify.message import Message
from engine.utils.codec import Record
from engine.utils.errors import CodedError, Problem, not_installed
from engine.utils.helper_process import HelperExitedError, HelperTimeoutError, ParentPipe, start_helper
from engine.utils.process import lower_priority
from engine.utils.text import printable

if TYPE_CHECKING:
    import logging

SEND_TIMEOUT_SECONDS = 20.0
MAX_REASON_CHARS = 200
# Shorter parts of a URL are not secrets, and would blank out half of an error message.
MIN_SECRET_CHARS = 3
# A host name is shown. The token that many services have in its place contains no dot.
_HOST_NAME = re.compile(r"localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")
# Parameters that make apprise send a local file.
_FILE_PARAMETERS = ("template",)


@dataclass(frozen=True)
class Delivery:
    """What became of a message at one destination.

    `label` names the destination, or says why it cannot be read. `service` is its kind and host, "" if unknown.
    `reason` is why it was not sent.
    """

    label: str
    sent: bool
    service: str = ""
    reason: str = ""
    can_retry: bool = True
    """Whether another try may succeed."""
    code: str = ""
    """The kind of the problem if it was not sent, as in `Problem`."""

    @property
    def line(self) -> str:
        """The delivery as one line of text."""
        name = f"{self.label} ({self.service})" if self.service else self.label
        outcome = "sent" if self.sent else self.reason
        return f"{name}: {outcome}" if outcome else name


class SendRequest(Record, frozen=True):
    """Request to the helper process: send a message to the destinations with these labels."""

    message: Message
    references: tuple[str, ...]
    labels: tuple[str, ...]
    in_background: bool


def send_message(
    message: Message,
    references: Iterable[str],
    labels: Sequence[str] | None = None,
    timeout_s: float = SEND_TIMEOUT_SECONDS,
    *,
    in_background: bool = False,
) -> list[Delivery]:
    """Send a message to all destinations, or to those with these labels, and return what became of it.

    Destinations that cannot be read are among them, with the reason. Takes at most `timeout_s` seconds. A sender
    `in_background` has a low priority.
    """
    references = list(references)
    found = read_destinations(references)
    waiting = {item.label: True for item in found.found if labels is None or item.label in labels}
    problems = found.problems if labels is None else []
    deliveries = [Delivery(str(problem), sent=False, can_retry=False, code=problem.code) for problem in problems]
    if not waiting:
        return deliveries
    silent, deadline = Problem("", f"no answer within {timeout_s:g} s", code="timed-out"), time.monotonic() + timeout_s
    try:
        with start_helper("engine.notify.sender") as helper:
            # The helper reads the URLs itself, so that they pass through no pipe.
            helper.send(SendRequest(message, tuple(references), tuple(waiting), in_background))
            while waiting:
                delivery = helper.receive(Delivery, max(deadline - time.monotonic(), 0.0))
                waiting.pop(delivery.label, None)
                deliveries.append(delivery)
    except HelperTimeoutError:
        pass
    except (HelperExitedError, OSError) as error:
        reason = f"the process that sends messages ended: {printable(str(error))[:MAX_REASON_CHARS]}"
        silent = Problem("", reason, code="internal-error")
    return deliveries + [Delivery(label, sent=False, reason=silent.reason, code=silent.code) for label in waiting]


def main(parent: ParentPipe) -> None:
    """Answer one request of `send_message`: one delivery per destination, as soon as it is known."""
    import queue
    import threading

    request = parent.receive(SendRequest)
    if request.in_background:
        # apprise takes a second of CPU time to import its services, and training has the CPU first.
        lower_priority()
    found = read_destinations(request.references).found
    destinations = [destination for destination in found if destination.label in request.labels]
    results: queue.Queue[Delivery] = queue.Queue()
    try:
        import apprise  # noqa: F401
    except ImportError:
        for destination in destinations:
            reason = not_installed("apprise")
            missing = Delivery(destination.label, sent=False, reason=reason, can_retry=False, code="not-installed")
            results.put(missing)
    else:
        log = _ReasonLog()
        for destination in destinations:
            arguments = (destination, request.message, log, results)
            threading.Thread(target=_send, args=arguments, daemon=True).start()
    for _ in destinations:
        parent.send(results.get())


class _UnusableUrlError(CodedError):
    """A URL that apprise cannot use. The message says why, without the URL."""


class _ReasonLog:
    """The last warning that apprise logged for each destination: its calls return no reason."""

    def __init__(self) -> None:
        import logging

        self.current: ContextVar[str] = ContextVar("label", default="")
        self.reasons: dict[str, str] = {}
        log, handler = logging.getLogger("apprise"), logging.Handler(logging.WARNING)
        handler.emit = self._keep  # type: ignore[method-assign]
        log.addHandler(handler)
        log.setLevel(logging.WARNING)
        log.propagate = False

    def _keep(self, record: logging.LogRecord) -> None:
        self.reasons[self.current.get()] = record.getMessage()


def _send(destination: Destination, message: Message, log: _ReasonLog, results: Any) -> None:
    """Send a message to one destination, and put the delivery into the queue `results`."""
    log.current.set(destination.label)
    sent, service, can_retry, code = False, "", True, "connection-failed"
    try:
        asset = _make_asset()
        plugin = _make_service(destination.url, asset)
        service = describe_service(plugin)
        sent = _notify(plugin, asset, message)
        reason = "" if sent else log.reasons.get(destination.label, "apprise reports no reason")
    except _UnusableUrlError as error:
        reason, can_retry, code = str(error), False, error.code
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    reason = redact(reason, destination.url)[:MAX_REASON_CHARS]
    results.put(Delivery(destination.label, sent, service, reason, can_retry, code="" if sent else code))


def _make_asset() -> Any:
    """Return apprise's settings: no plug-ins of the user, nothing written to disk, no keys generated there."""
    import apprise

    asset = apprise.AppriseAsset(app_id="gputrain", app_desc="gputrain", async_mode=False, storage_mode="memory")
    for name in ("pgp_autogen", "pem_autogen"):
        if hasattr(asset, name):
            setattr(asset, name, False)
    return asset


def _make_service(url: str, asset: Any) -> Any:
    """Return apprise's object for a URL. Raises _UnusableUrlError."""
    import apprise

    parameters = url.partition("?")[2].lower().split("&")
    if any(part.partition("=")[0] in _FILE_PARAMETERS for part in parameters):
        raise _UnusableUrlError("the URL must not name a template, which is a local file", code="not-supported")
    # Unlike Apprise.add, it accepts one URL of a service only: no list, and no config file.
    plugin = apprise.Apprise.instantiate(url, asset=asset)
    if plugin is None:
        raise _UnusableUrlError("apprise does not know this service, or its URL is incomplete", code="invalid-value")
    return plugin


def _notify(plugin: Any, asset: Any, message: Message) -> bool:
    """Return whether the service took the message."""
    import apprise

    sender = apprise.Apprise(asset=asset)
    sender.add(plugin)
    return bool(
        sender.notify(
            body=message.body,
            title=message.title,
            # apprise 1.9.0 has a class of strings, later releases an enumeration.
            notify_type=getattr(apprise.NotifyType, message.level.upper()),
            body_format=apprise.NotifyFormat.TEXT,
        )
    )


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
