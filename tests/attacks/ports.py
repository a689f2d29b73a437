"""Connections to the TCP ports of a run: the ranks accept none once they train."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import psutil
from attack import Stage, perform

MAX_SECONDS = 90.0
CONNECT = """
import socket, sys
for port in sys.argv[1:]:
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=0.5)
        print(port)
    except OSError:
        pass
"""


def listening_ports(process: psutil.Process) -> list[int]:
    """Return the TCP ports on which a process and its descendants listen."""
    connections = [c for child in (process, *process.children(recursive=True)) for c in child.net_connections("tcp")]
    return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]


def attack(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        accepted = stage.as_attacker(CONNECT, port).split()
    assert accepted == [port], "the attacker cannot connect to a port that is open"
    runs = stage.home / "runs"
    arguments = ["run", "digits", "--headless", "--gpus", "cpu", "--ranks", "2", "--epochs", "100000", "--name", "a"]
    run = subprocess.Popen(
        [sys.executable, "-P", "-c", "from tui import main; main()", *arguments],
        cwd=stage.home, env=stage.environment | {"GPUTRAIN_RUNS": str(runs)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    journal, deadline = runs / "a" / "events.jsonl", time.monotonic() + MAX_SECONDS
    try:
        while not (journal.exists() and b'"epoch"' in journal.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        ports = listening_ports(psutil.Process(run.pid))
        # Without a port, the attack would prove nothing.
        stage.gained(not ports, "nothing, because the run did not start")
        accepted = stage.as_attacker(CONNECT, *map(str, ports)).split()
        stage.gained(bool(accepted), f"connections to {len(accepted)} of {len(ports)} ports of the ranks")
    finally:
        run.terminate()
        run.wait(60)


if __name__ == "__main__":
    perform(attack)
