"""Benchmark the comparison of long runs in a pseudo-terminal: `python tests/bench/compare.py [--rounds N]`.

Eight runs of 100,000 steps are marked in the list of runs, and `c` compares them: at first without a cache, then with
their reduced curves in memory, and in a new process with those on disk. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.config.yaml_io import to_yaml
from engine.runs.events import RunFinished, StepEvent
from engine.runs.journal import to_line
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.screen.pseudo_terminal import ESCAPES, PseudoTerminal

COLUMNS, ROWS = 160, 48
RUNS, STEPS, LOG_EVERY, STEPS_PER_EPOCH, STEP_SECONDS = 8, 100_000, 10, 1000, 0.05
TUI = str(Path(sys.executable).with_name("gputrain-tui"))
SETTLE_SECONDS = 3.0
# The panel of the runs lists a value of the training loss for each run that is drawn.
LAST_RUN_DRAWN = rb"H long-\d +[0-9]"
FIRST_RUN_DRAWN = rb"A long-\d +[0-9]"


def make_runs(root: Path) -> None:
    for number in range(RUNS):
        noise = random.Random(number)
        start = replace(make_run_started(0.0), epochs=STEPS // STEPS_PER_EPOCH, steps_per_epoch=STEPS_PER_EPOCH)
        lines = [to_line(start)]
        for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY):
            losses = [2 * math.exp(-step / (20_000 + 2_000 * number)) + 0.3 * noise.random() for _ in range(LOG_EVERY)]
            event = StepEvent(
                time=step * STEP_SECONDS, step=step, epoch=(step - 1) // STEPS_PER_EPOCH + 1, losses=losses,
                lr=0.1 * (1 - step / STEPS), images_per_second=3e4 + noise.random(), data_wait=0.01,
                grad_norm=1 + noise.random(),
            )  # fmt: skip
            lines.append(to_line(event))
            if step % STEPS_PER_EPOCH == 0:
                accuracy = 1 - 1 / (2 + step / (5_000 + 1_000 * number))
                epoch = make_epoch(step // STEPS_PER_EPOCH, accuracy, step * STEP_SECONDS)
                lines.append(to_line(replace(epoch, step=step)))
        lines.append(to_line(RunFinished(time=STEPS * STEP_SECONDS, state="finished")))
        folder = make_run_folder(root, f"long-{number}")
        folder.journal.write_text("\n".join(lines) + "\n")
        folder.config.write_text(to_yaml({"optim": {"lr": 0.01 * (number + 1)}}))


def seconds_until(terminal: PseudoTerminal, pattern: bytes, first: int, start: float) -> float:
    """Return the seconds from `start` until the output since piece `first` contains the pattern."""
    while terminal.seconds_since_start() < start + 60:
        seen = b""
        for at, data in terminal.output[first:]:
            seen += data
            if re.search(pattern, ESCAPES.sub(b"", seen)):
                return at - start
        terminal.read(0.02)
    raise TimeoutError(ESCAPES.sub(b"", seen)[-500:])


def compare(terminal: PseudoTerminal) -> tuple[float, float, float]:
    """Press `c`; return seconds until the first and until the last run is drawn, and the CPU time until then."""
    first, start, cpu = len(terminal.output), terminal.seconds_since_start(), terminal.cpu_seconds()
    terminal.press("c")
    one = seconds_until(terminal, FIRST_RUN_DRAWN, first, start)
    last = seconds_until(terminal, LAST_RUN_DRAWN, first, start)
    return one, last, terminal.cpu_seconds() - cpu


def measure(root: Path, rounds: int) -> Iterator[tuple[str, tuple[float, float, float]]]:
    environment = os.environ | {
        "GPUTRAIN_RUNS": str(root / "runs"),
        "GPUTRAIN_RESERVATIONS": str(root / "reservations"),
    }
    environment |= {f"XDG_{kind}_HOME": str(root / kind) for kind in ("STATE", "CONFIG", "CACHE")}
    for _ in range(rounds):
        shutil.rmtree(root / "CACHE/gputrain/curves", ignore_errors=True)
        for name in ("no cache", "cache on disk"):
            with PseudoTerminal([TUI], COLUMNS, ROWS, environment) as terminal:
                terminal.seconds_until("quit")
                terminal.read(SETTLE_SECONDS)
                terminal.press("r")
                terminal.read(SETTLE_SECONDS)
                terminal.press("M")
                terminal.read(SETTLE_SECONDS)
                yield name, compare(terminal)
                terminal.read(SETTLE_SECONDS)
                if name == "no cache":
                    terminal.press("\x1b")
                    terminal.read(SETTLE_SECONDS)
                    yield "curves in memory", compare(terminal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    measured: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="gputrain-bench-") as folder:
        make_runs(Path(folder) / "runs")
        for name, seconds in measure(Path(folder), options.rounds):
            measured.setdefault(name, []).append(seconds)
    print(f"Measured {time.strftime('%F')}, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}\n")
    print("| `c` with | first curves (s) | all curves (s) | CPU time (s) |\n|---|---|---|---|")
    for name, values in measured.items():
        first, last, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"| {name} | {first:.2f} | {last:.2f} (least {min(value[1] for value in values):.2f}) | {cpu:.2f} |")


if __name__ == "__main__":
    main()
