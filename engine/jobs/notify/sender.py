"""Send one message through apprise to the URLs of `notify.urls` and of the user's own file, and tell why one failed.

A URL contains secrets, so it exists only in memory here. Whatever is stored or shown is the label of a destination."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from engine.base.errors import Problem, UsageError, collect_problems, not_installed
from engine.base.files import append_to_file, config_folder, read_bytes
from engine.base.text import printable
from engine.jobs.notify.message import Message
from engine.runs.folder import RunFolder

USER_FILE = "notify"
MAX_FILE_BYTES = 1 << 16
_URL = re.compile(r"[A-Za-z0-9]{2,20}://\S+")


class Destination(NamedTuple):
    """One apprise URL. `label` names it without its content: `env:NAME`, or a file and the number of the line."""

    label: str
    url: str

    def __repr__(self) -> str:
        return self.label


def user_file() -> Path:
    """Return the path of the user's file of URLs for all runs: `$XDG_CONFIG_HOME/gputrain/notify`."""
    return config_folder() / USER_FILE


def has_destinations(references: Iterable[str]) -> bool:
    """Whether a run has something to send messages to: references, or the user's file."""
    return any(True for _ in references) or _has_user_file()


def _has_user_file() -> bool:
    # `Path.exists` raises PermissionError, as where another user's home is this process's.
    return os.access(user_file(), os.F_OK)


def read_destinations(
    references: Iterable[str], environment: Mapping[str, str] = os.environ
) -> tuple[list[Destination], list[Problem]]:
    """Return the destinations of `notify.urls` and of the user's file, each URL once, and why others cannot be read."""
    problems, found = list[Problem](), dict[str, Destination]()
    sources = [*references, *([f"file:{user_file()}"] if _has_user_file() else [])]
    for source in sources:
        kind, _, name = source.partition(":")
        with collect_problems(problems):
            if kind == "file":
                destinations = _read_file(Path(name), source)
            elif url := environment.get(name, "").strip():
                destinations = [Destination(source, url)]
            else:
                reason = f"{source}: the environment variable {name} is not set; export {name}=URL"
                raise UsageError.one("", reason, code="missing-value")
            for destination in destinations:
                if _URL.fullmatch(destination.url) is None:
                    reason = f"{destination.label} is not an apprise URL such as ntfy://TOPIC"
                    problems.append(Problem("", reason, code="invalid-value"))
                else:
                    found.setdefault(destination.url, destination)
    return [*found.values()], problems


def _read_file(path: Path, label: str) -> list[Destination]:
    """Return the lines of a file: one URL per line, empty lines and lines that begin with # are skipped. Raises
    UsageError."""
    try:
        # The file may be a symbolic link: programs that manage dotfiles create one. What counts is
        # its target.
        target = path.resolve()
        status = target.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            reason = f"{label} is not used: other users may read it; it must be yours, chmod 600 {path}"
            raise UsageError.one("", reason, code="foreign-readable")
        text = read_bytes(target, MAX_FILE_BYTES).decode()
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = f"{label} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError.one("", reason, code="not-readable") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    urls = [Destination(f"{label} line {number}", line) for number, line in lines if line and not line.startswith("#")]
    if not urls:
        raise UsageError.one("", f"{label} contains no URL; write one apprise URL per line", code="missing-value")
    return urls


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
    service, failure = "", ""
    # Its lines may have secrets, and go to no handler of the user's code.
    logging.getLogger("apprise").propagate = False
    # The calls return no reason.
    with apprise.LogCapture(level=logging.WARNING, fmt="%(message)s") as log:  # type: ignore[no-untyped-call]
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
            failure = f"{type(error).__name__}: {error}"
    last = failure or ["apprise reports no reason", *log.getvalue().splitlines()][-1]
    return Delivery(label, False, service, redact(last, url)[:MAX_REASON_CHARS], "connection-failed")


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
