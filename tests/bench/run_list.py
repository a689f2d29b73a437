"""Benchmark the list of runs in a pseudo-terminal: `python tests/bench/run_list.py [--runs 10000] [--presses 9]`.

Measures the time from the key that opens the list to its first page and to the last run, and the CPU time of its keys,
first without and then with the index of an earlier start. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.config.loader import validate_config
from engine.config.schema import as_dict
from engine.config.yaml_io import to_yaml
from engine.runs.events import RunFinished
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.screen.pseudo_terminal import PseudoTerminal

COLUMNS, ROWS = 160, 48
SETTLE_SECONDS = 3.0
KEY_SECONDS = 0.4
MAX_READ_SECONDS = 300.0
TUI = str(Path(sys.executable).with_name("gputrain-tui"))
DOWN, PAGE_DOWN, ESCAPE = "\x1b[B", "\x1b[6~", "\x1b"
QUERY = "optim.name=adamw val_accuracy>0.5 finished"
SETUPS = (("sgd", 0.1, "resnet18"), ("adamw", 0.001, "resnet34"), ("adam", 0.0003, "cnn"))


def make_runs(root: Path, count: int) -> None:
    """Create ended runs of three optimizers and models, every seventh of them failed."""
    configs = []
    for optimizer, lr, model in SETUPS:
        sections = {"optim": {"name": optimizer, "lr": lr}, "model": {"name": model}}
        configs.append(to_yaml(as_dict(validate_config(sections))))
    now = time.time()
    for number in range(count):
        started = replace(make_run_started(now - 600 - number), name=f"sweep-{number:05d}")
        epochs = [make_epoch(epoch, (number % 97) / 100 + epoch / 1000, now - 500 - number) for epoch in (1, 2, 3)]
        end = RunFinished(time=now - 400 - number, state="failed" if number % 7 == 0 else "finished", message="")
        folder = make_run_folder(root, started.name, started, *epochs, end)
        folder.config.write_text(configs[number % len(configs)])
        os.utime(folder.config, (now - 600 - number, now - 600 - number))


def open_list(environment: Mapping[str, str], runs: int) -> tuple[PseudoTerminal, float, float]:
    """Start the screen and open the list. Return it with the seconds from the key to the first page and to all runs."""
    terminal = PseudoTerminal([TUI], COLUMNS, ROWS, environment)
    terminal.seconds_until("quit")
    terminal.press("r")
    pressed = terminal.seconds_since_start()
    first = terminal.seconds_until(r"(?s)best acc.*sweep-000\d\d")
    every = terminal.seconds_until(rf"[^\d]{runs} runs", MAX_READ_SECONDS)
    terminal.read(SETTLE_SECONDS)
    return terminal, first - pressed, every - pressed


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--presses", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gputrain-bench-") as folder:
        root = Path(folder)
        make_runs(root / "runs", options.runs)
        state = {f"XDG_{kind}_HOME": str(root / kind) for kind in ("STATE", "CONFIG", "CACHE")}
        reservations = {"GPUTRAIN_RUNS": str(root / "runs"), "GPUTRAIN_RESERVATIONS": str(root / "reservations")}
        environment = os.environ | state | reservations
        print("| index | first page (s) | all runs (s) |\n|---|---|---|")
        for index in ("none", "of the start before", "of the start before"):
            terminal, first, every = open_list(environment, options.runs)
            print(f"| {index} | {first:.2f} | {every:.2f} |", flush=True)
            with terminal:
                keys = list(measure_keys(terminal, options.presses)) if index != "none" else []
        print("\n| key | CPU time, median (ms) | highest |\n|---|---|---|")
        for label, times in keys:
            print(f"| {label} | {statistics.median(times):.1f} | {max(times):.1f} |")


if __name__ == "__main__":
    main()
