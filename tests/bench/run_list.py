"""Benchmark the list of runs in a pseudo-terminal: `python tests/bench/run_list.py [--runs 10000] [--starts 5]`.

Measures the time from the key that opens the list to its first page and to the last run, how long a key takes
meanwhile, and the CPU time of keys. `--delay-ms 5` delays each open and each stat of the runs, as a file server does.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.config.loader import validate_config
from engine.config.schema import as_stored
from engine.config.yaml_io import to_yaml
from engine.runs.events import RunFinished
from engine.runs.history import history_from_events
from engine.runs.run_config import changed_values
from engine.utils.codec import write_record
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.screen.pseudo_terminal import ESCAPES, PseudoTerminal

COLUMNS, ROWS = 160, 48
SETTLE_SECONDS = 3.0
KEY_SECONDS = 0.4
MAX_READ_SECONDS = 300.0
TUI = str(Path(sys.executable).with_name("gputrain-tui"))
SLOW_FILES = Path(__file__).parents[1] / "support" / "slow_files.c"
DOWN, PAGE_DOWN, ESCAPE = "\x1b[B", "\x1b[6~", "\x1b"
FIRST_PAGE, ALL_READ = r"(?s)best val acc.*sweep-\d{5}", r"[^\d]{runs} runs"
HELP = b"Compare the curves and configs"
QUERY = "optim.name=adamw val_accuracy>0.5 finished"
SETUPS = (("sgd", 0.1, "resnet18"), ("adamw", 0.001, "resnet34"), ("adam", 0.0003, "cnn"))


def make_runs(root: Path, count: int) -> None:
    """Create ended runs of three optimizers and models, every seventh of them failed."""
    configs = []
    for optimizer, lr, model in SETUPS:
        sections = {"optim": {"name": optimizer, "lr": lr}, "model": {"name": model}}
        configs.append(as_stored(validate_config(sections)))
    now = time.time()
    for number in range(count):
        started = replace(make_run_started(now - 600 - number), name=f"sweep-{number:05d}")
        epochs = [make_epoch(epoch, (number % 97) / 100 + epoch / 1000, now - 500 - number) for epoch in (1, 2, 3)]
        end = RunFinished(time=now - 400 - number, state="failed" if number % 7 == 0 else "finished", message="")
        events, config = [started, *epochs, end], configs[number % len(configs)]
        folder = make_run_folder(root, started.name, *events)
        folder.config.write_text(to_yaml(config))
        write_record(folder.summary, history_from_events(events).record(changed_values(config)))


def delaying(folder: Path, runs: Path, milliseconds: float) -> dict[str, str]:
    """Build the library that delays files in `folder`; return the variables that make a program use it for `runs`."""
    library = folder / "slow_files.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SLOW_FILES)], check=True)
    return {"LD_PRELOAD": str(library), "SLOW_FOLDER": str(runs), "SLOW_MS": str(milliseconds)}


def open_list(environment: Mapping[str, str]) -> tuple[PseudoTerminal, float]:
    """Start the screen and press the key that opens the list. Return it, and when the key was pressed, in seconds."""
    terminal = PseudoTerminal([TUI], COLUMNS, ROWS, environment)
    terminal.seconds_until("quit")
    terminal.press("r")
    return terminal, terminal.seconds_since_start()


def measure_start(environment: Mapping[str, str], runs: int) -> tuple[float, float]:
    """Return the seconds from the key that opens the list to its first page and to all runs."""
    terminal, pressed = open_list(environment)
    with terminal:
        first = terminal.seconds_until(FIRST_PAGE)
        return first - pressed, terminal.seconds_until(ALL_READ.format(runs=runs), MAX_READ_SECONDS) - pressed


def measure_keys_meanwhile(environment: Mapping[str, str], runs: int) -> list[float]:
    """Open the help again and again while the runs are read. Return the milliseconds from each key to the help."""
    terminal, _ = open_list(environment)
    times = []
    with terminal:
        terminal.seconds_until(FIRST_PAGE)
        complete = re.compile(ALL_READ.format(runs=runs).encode())
        while not complete.search(ESCAPES.sub(b"", terminal.read(KEY_SECONDS))):
            start, position = terminal.seconds_since_start(), len(terminal.output)
            terminal.press("?")
            while HELP not in b"".join(data for _, data in terminal.output[position:]):
                terminal.read(0.002)
            times.append(1000 * (terminal.seconds_since_start() - start))
            terminal.press(ESCAPE)
    return times


def key_milliseconds(terminal: PseudoTerminal, key: str) -> float:
    """CPU time in milliseconds from a key until the program is idle again."""
    start = terminal.cpu_seconds()
    terminal.press(key)
    terminal.read(KEY_SECONDS)
    return 1000 * (terminal.cpu_seconds() - start)


def measure_keys(terminal: PseudoTerminal, presses: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the label of each kind of key, and its CPU times."""
    idle = [key_milliseconds(terminal, "") for _ in range(presses)]
    yield "none (the refresh of the screen)", idle
    for label, key in (("down", DOWN), ("page down", PAGE_DOWN), ("mark", " ")):
        yield label, [key_milliseconds(terminal, key) for _ in range(presses)]
    times = []
    for _ in range(presses):
        terminal.press("o")
        terminal.read(KEY_SECONDS)
        times.append(key_milliseconds(terminal, "\r"))
    yield "sort", times
    key_milliseconds(terminal, "/")
    yield "letter of a filter", [key_milliseconds(terminal, letter) for letter in QUERY]
    key_milliseconds(terminal, ESCAPE)


def median_of(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--presses", type=int, default=9)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gputrain-bench-") as folder:
        root = Path(folder)
        make_runs(root / "runs", options.runs)
        state = {f"XDG_{kind}_HOME": str(root / kind) for kind in ("STATE", "CONFIG", "CACHE")}
        reservations = {"GPUTRAIN_RUNS": str(root / "runs"), "GPUTRAIN_RESERVATIONS": str(root / "reservations")}
        environment = os.environ | state | reservations
        if options.delay_ms:
            environment |= delaying(root, root / "runs", options.delay_ms)
        starts = [measure_start(environment, options.runs) for _ in range(options.starts)]
        first, every = zip(*starts, strict=True)
        print("| first page (s) | all runs (s) |\n|---|---|")
        print(f"| {median_of(first)} | {median_of(every)} |", flush=True)
        if options.delay_ms:
            times = measure_keys_meanwhile(environment, options.runs)
            print(f"\nFrom ? to the help while runs are read, {len(times)} times: {median_of(times)} ms", flush=True)
        terminal, _ = open_list(environment)
        with terminal:
            terminal.seconds_until(ALL_READ.format(runs=options.runs), MAX_READ_SECONDS)
            terminal.read(SETTLE_SECONDS)
            keys = list(measure_keys(terminal, options.presses))
        print("\n| key | CPU time, median (ms) | highest |\n|---|---|---|")
        for label, times in keys:
            print(f"| {label} | {statistics.median(times):.1f} | {max(times):.1f} |")


if __name__ == "__main__":
    main()
