"""Steps per second of one run of the digits while its messages are sent, and while nothing is sent.

    python tests/bench/notify.py [PAIRS]

The servers hang, refuse and are gone, and one answers. The run stays the same. Its watcher is stopped (SIGSTOP) and
continued in turns of `TURN_SECONDS`, so that both kinds of turns see the same load of the host. While it runs, the
message is sent again and again, because each try but one fails.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from support.gputrain_command import GPUTRAIN, clean_environment, read_complete_events, wait_for
from support.servers.notify_server import gone_server, hanging_server, notify_server

TURN_SECONDS = 6.0


def find_helpers(mark: str) -> list[psutil.Process]:
    """Return the watcher and its senders."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GPUTRAIN_TEST") == mark and "engine.notify" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def count_steps(journal: Path) -> int:
    return max((event["step"] for event in read_complete_events(journal) if event["type"] == "step"), default=0)


def measure_turn(journal: Path, mark: str, number: signal.Signals) -> float:
    """Send a signal to the watcher and its senders, and return the steps per second of a turn."""
    for process in find_helpers(mark):
        process.send_signal(number)
    began, steps = time.monotonic(), count_steps(journal)
    time.sleep(TURN_SECONDS)
    return (count_steps(journal) - steps) / (time.monotonic() - began)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with (
        tempfile.TemporaryDirectory() as name,
        notify_server() as answers,
        notify_server(500) as refuses,
        hanging_server() as hangs,
    ):
        folder = Path(name)
        environment = clean_environment(folder)
        environment |= {"ANSWERS": answers.url, "HANGS": f"{hangs.url}?rto=600", "REFUSES": refuses.url}
        environment["GONE"] = gone_server().url
        mark = environment["GPUTRAIN_TEST"]
        urls = "notify.urls=[env:ANSWERS,env:HANGS,env:REFUSES,env:GONE]"
        # The first message is sent at once: the run makes no progress for 0.06 s.
        command = [GPUTRAIN, "run", "--headless", "digits", "--epochs", "1000000", "--name", "run", urls]
        process = subprocess.Popen([*command, "notify.stall_minutes=0.001"], cwd=folder, env=environment)
        journal = folder / "runs" / "run" / "events.jsonl"
        wait_for(lambda: journal.exists() and count_steps(journal) > 500, "500 steps", 200)
        ratios = []
        for number in range(pairs):
            order = (signal.SIGCONT, signal.SIGSTOP) if number % 2 == 0 else (signal.SIGSTOP, signal.SIGCONT)
            rates = {signum: measure_turn(journal, mark, signum) for signum in order}
            ratios.append(rates[signal.SIGCONT] / rates[signal.SIGSTOP])
            print(f"with {rates[signal.SIGCONT]:7.1f}  without {rates[signal.SIGSTOP]:7.1f}  ratio {ratios[-1]:.3f}")
        for helper in find_helpers(mark):
            helper.send_signal(signal.SIGCONT)
        stopped_at = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)
        print(f"median ratio {statistics.median(ratios):.3f}, exit after {time.monotonic() - stopped_at:.2f} s")
        print((folder / "runs" / "run" / "notify.log").read_text())
        for helper in find_helpers(mark):
            helper.kill()


if __name__ == "__main__":
    main()
