"""The outbox repeats failed deliveries a bounded number of times, and logs each of them without secrets."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.notify.message import Message
from engine.notify.message import test_message as make_test_message
from engine.notify.outbox import MAX_LOG_BYTES, NotifyLog, Outbox
from engine.notify.sender import Delivery
from engine.runs.folder import RunFolder
from support.runs.factories import make_run_folder


@dataclass
class Network:
    """Destinations a and b; those in `down` take no message. `sent_to` has the labels of each try."""

    folder: RunFolder
    down: set[str]
    now: float = 0.0
    sent_to: list[tuple[str, ...]] = field(default_factory=list)

    def send(self, _: Message, urls: Sequence[str], labels: Sequence[str] | None) -> list[Delivery]:
        tried = tuple(urls if labels is None else labels)
        self.sent_to.append(tried)
        return [Delivery(label, label not in self.down, "ntfy", "no route to host") for label in tried]

    def outbox(self) -> Outbox:
        return Outbox(["a", "b"], NotifyLog(self.folder), (5.0, 30.0), self.send, lambda: self.now)


def test_outbox_repeats_only_failed_destinations_then_gives_up(tmp_path: Path) -> None:
    network = Network(make_run_folder(tmp_path, "run"), {"b"})
    outbox = network.outbox()
    outbox.add(make_test_message("host"))
    tries_at = []
    while not outbox.is_empty:
        before = len(network.sent_to)
        outbox.tick()
        tries_at += [network.now] if len(network.sent_to) > before else []
        network.now += 1
    assert network.sent_to == [("a", "b"), ("b",), ("b",)]
    assert tries_at == [0.0, 5.0, 35.0]
    lines = network.folder.notify_log.read_text().splitlines()
    assert [line[21:] for line in lines] == [
        "test: a (ntfy): sent",
        "test: b (ntfy): no route to host (try 1 of 3)",
        "test: b (ntfy): no route to host (try 2 of 3)",
        "test: b (ntfy): no route to host (try 3 of 3)",
    ]


def test_outbox_sends_next_message_while_another_waits_for_its_retry(tmp_path: Path) -> None:
    network = Network(make_run_folder(tmp_path, "run"), {"a", "b"})
    outbox = network.outbox()
    outbox.add(make_test_message("first"))
    outbox.tick()
    network.down.clear()
    outbox.add(make_test_message("second"))
    outbox.tick()
    assert not outbox.is_empty
    network.now = 5.0
    outbox.tick()
    assert outbox.is_empty
    assert len(network.sent_to) == 3


def test_log_is_private_bounded_and_survives_deleted_folder(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "run")
    log = NotifyLog(folder)
    log.write("\x1b[31m")
    assert stat.S_IMODE(folder.notify_log.stat().st_mode) == 0o600
    assert r"\x1b[31m" in folder.notify_log.read_text()
    folder.notify_log.write_text("x" * MAX_LOG_BYTES)
    log.write("more")
    assert folder.notify_log.stat().st_size == MAX_LOG_BYTES
    NotifyLog(RunFolder(tmp_path / "deleted")).write("nothing")


def test_log_is_not_written_through_link(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "run")
    folder.notify_log.symlink_to(tmp_path / "target")
    NotifyLog(folder).write("line")
    assert not (tmp_path / "target").exists()
