"""Benchmark the screen of a large foreign run: `python tests/bench/foreign_screen.py [--events 10_000_000]`.

Writes an event file of 5 GB with images, whose bytes are holes, and opens it in a pseudo-terminal with
`gputrain watch`. Prints the seconds from the start of the program to the first points and to the whole run, the memory
of the process at the end, its CPU time, and the delay of a key while the run is read. Then reads the run once more
without a screen, and verifies the extremes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.foreign.folders import find_runs
from engine.show.foreign_curves import CurveReader
from support.large_run import KnownMetric, write_large_run
from support.screen.pseudo_terminal import ESCAPES, PseudoTerminal

COLUMNS, ROWS = 160, 48
GPUTRAIN = str(Path(sys.executable).with_name("gputrain"))
LIMIT_SECONDS = 900.0
KEY_PAUSE_SECONDS = 1.0
MAX_KEY_SECONDS = 5.0
IDLE_SHARE = 0.2


def watch(folder: Path) -> None:
    """Open the run, and print how it is shown while it is read."""
    with PseudoTerminal([GPUTRAIN, "watch", str(folder)], COLUMNS, ROWS) as terminal:
        first = terminal.seconds_until(r"\d+% read step", LIMIT_SECONDS)
        delays: list[float] = []
        process = psutil.Process(terminal.process.pid)
        # A thread that reads uses a whole core. Text of the screen cannot tell, because only changed cells are written.
        while terminal.seconds_since_start() < LIMIT_SECONDS:
            delays.append(key_delay(terminal))
            before = terminal.cpu_seconds()
            terminal.read(KEY_PAUSE_SECONDS)
            if terminal.cpu_seconds() - before < IDLE_SHARE * KEY_PAUSE_SECONDS:
                break
        seconds, memory = terminal.seconds_since_start(), process.memory_info().rss / 1e6
        print(f"| first points | whole run | CPU time | memory | key, median | key, longest |\n|{'---|' * 6}")
        cpu = sum(process.cpu_times()[:2])
        middle, longest = 1000 * statistics.median(delays), 1000 * max(delays)
        print(
            f"| {first:.1f} s | {seconds:.0f} s | {cpu:.0f} s | {memory:.0f} MB | {middle:.0f} ms | {longest:.0f} ms |"
        )


def key_delay(terminal: PseudoTerminal) -> float:
    """Open the help and close it, and return the seconds until it has opened."""
    started, seen = time.perf_counter(), b""
    terminal.press("?")
    while (seconds := time.perf_counter() - started) < MAX_KEY_SECONDS:
        seen += terminal.read(0.005)
        if b"This screen" in ESCAPES.sub(b"", seen):
            break
    terminal.press("\x1b")
    return seconds


def verify(folder: Path, known: dict[str, KnownMetric]) -> None:
    """Read the run without a screen, and compare the extremes of each metric with those that were written."""
    reader, started = CurveReader(find_runs(folder).runs[0]), time.process_time()
    while reader.read_slice():
        pass
    for name, metric in known.items():
        found = reader.curves.extremes(name)
        assert (found.count, found.low, found.high, found.last) == (metric.count, metric.low, metric.high, metric.last)
    seconds = time.process_time() - started
    print(f"\n{len(known)} metrics have exact extremes; read without a screen in {seconds:.0f} s of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--bytes", type=int, default=5_000_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = write_large_run(folder / "events.out.tfevents.1.host", arguments.events, arguments.bytes)
        watch(folder)
        verify(folder, known)


if __name__ == "__main__":
    main()
