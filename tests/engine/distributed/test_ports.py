"""Ports that accept no further connections."""

from __future__ import annotations

import socket

import pytest

from engine.distributed.ports import close_ports_afterwards


def listen(family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    listener = socket.socket(family)
    listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
    listener.listen()
    return listener


def test_new_port_drops_connections_and_keeps_accepted_one() -> None:
    earlier = listen()
    with close_ports_afterwards():
        new = listen()
        peer = socket.create_connection(new.getsockname())
        accepted, _ = new.accept()
    peer.sendall(b"tensor")
    assert accepted.recv(6) == b"tensor"
    with pytest.raises(TimeoutError):
        socket.create_connection(new.getsockname(), timeout=0.3)
    # A port that was open before, such as that of a debugger, stays open.
    socket.create_connection(earlier.getsockname(), timeout=20).close()
    for opened in (earlier, new, peer, accepted):
        opened.close()


def test_port_stays_open_for_lazy_connections_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with close_ports_afterwards():
        new = listen()
    socket.create_connection(new.getsockname(), timeout=20).close()
    new.close()
