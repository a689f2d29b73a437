"""The channel between a rank and its supervisor: events, control requests and flushes."""

from __future__ import annotations

from multiprocessing import Pipe
from threading import Thread

import pytest

from engine.base.process import SignalHandler
from engine.runs.events import Event, FlushJournal, WarningEvent
from engine.train.distributed.channel import FLUSH_ACK, PipeChannel, RankConnection
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter


def connect() -> tuple[RankConnection, PipeChannel]:
    """Return the ends of the supervisor and of the rank."""
    mine, theirs = Pipe()
    return RankConnection(mine), PipeChannel(theirs, SignalHandler(), HeartbeatWriter(Heartbeats(1), 0))


def test_pipe_channel_flush_waits_until_supervisor_has_flushed_earlier_events() -> None:
    supervisor, rank = connect()
    rank.send(WarningEvent(message="earlier", code="no-effect"))
    flush = Thread(target=rank.flush, daemon=True)
    flush.start()
    events = []
    while len(events) < 2:
        events += supervisor.receive()
    assert [type(event) for event in events] == [WarningEvent, FlushJournal]
    supervisor.send("pause")
    while not rank.poll_requests().paused and flush.is_alive():
        flush.join(0.01)
    flush.join(0.05)
    assert flush.is_alive(), "a request is no acknowledgment"
    supervisor.send(FLUSH_ACK)
    flush.join(20)
    assert not flush.is_alive()
    assert rank.poll_requests().paused


def test_pipe_channel_flush_fails_without_supervisor() -> None:
    supervisor, rank = connect()
    supervisor.close()
    with pytest.raises(ConnectionError):
        rank.flush()


def test_pipe_channel_sends_and_receives_while_another_thread_flushes() -> None:
    supervisor, rank = connect()
    flush = Thread(target=lambda: [rank.flush() for _ in range(50)], daemon=True)
    flush.start()
    events: list[Event] = []
    sent = 0
    while flush.is_alive() or len(events) < 50 + sent:
        # The supervisor drops requests when hundreds wait in the buffer of the socket.
        if flush.is_alive() and sent - rank.poll_requests().checkpoints < 50:
            rank.send(WarningEvent(message="x" * 5000, code="no-effect"))
            sent += 1
            supervisor.send("checkpoint")
        for event in supervisor.receive():
            events.append(event)
            if isinstance(event, FlushJournal):
                supervisor.send(FLUSH_ACK)
    assert sum(isinstance(event, WarningEvent) for event in events) == sent
    assert rank.poll_requests().checkpoints == sent
