"""Benchmark a letter in the form: `python tests/bench/form.py [--size 120x34] [--rounds N] [FIELD ...]`.

A letter makes a field wrong, backspace makes it right again. The form is driven through a pseudo-terminal. It polls
nothing, and waits a second for the typing to rest: the CPU time until then is that of the key, the CPU time after it
that of validation and plan. Prints medians as Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.screen.pseudo_terminal import PseudoTerminal

REST_SECONDS, SETTLE_SECONDS = 1.0, 3.0
PROGRAM = f"""
import tui, tui.pollers.watched, tui.screens.form
tui.pollers.watched.RefreshIntervals.__init__.__defaults__ = (3600.0, 3600.0)
tui.screens.form.CHECK_DELAY_SECONDS = {REST_SECONDS}
tui.screen()
"""
BACKSPACE, SEARCH, ENTER, ESCAPE, ALL_FIELDS = "\x7f", "\x06", "\r", "\x1b", "\x0f"
# A field of each kind, and the letter that makes it wrong after its first value.
FIELDS = {
    "run.name": ("a", "/"),
    "data.workers": ("1", "x"),
    "optim.lr": ("1", "x"),
    "data.batch_size": ("8", "x"),
    "device.gpus": ("0", "x"),
    "data.path": ("/", "x"),
    "data.cache": ("1", "x"),
    "model.name": ("m", "x"),
    "schedule.milestones": ("1", "x"),
    "schedule.name": ("c", "x"),
}


def key_milliseconds(terminal: PseudoTerminal, key: str) -> tuple[float, float]:
    """Return the CPU time of a key, and that of what follows when the typing rests, in milliseconds."""
    start = terminal.cpu_seconds()
    terminal.press(key)
    terminal.read(0.9 * REST_SECONDS)
    typed = terminal.cpu_seconds()
    terminal.read(REST_SECONDS)
    return 1000 * (typed - start), 1000 * (terminal.cpu_seconds() - typed)


def measure(size: tuple[int, int], names: list[str], rounds: int, *, show_all: bool) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gputrain-bench-") as folder:
        state = {f"XDG_{kind}_HOME": f"{folder}/{kind}" for kind in ("STATE", "CONFIG", "CACHE")}
        environment = {**os.environ, **state, "GPUTRAIN_RUNS": f"{folder}/runs"}
        with PseudoTerminal([sys.executable, "-c", PROGRAM], *size, environment) as terminal:
            terminal.seconds_until("quit")
            for key in ["n", *([ALL_FIELDS] if show_all else [])]:
                terminal.read(SETTLE_SECONDS)
                terminal.press(key)
            terminal.read(SETTLE_SECONDS)
            yield "| field | key | CPU time of the key (ms) | when the typing rests (ms) |\n|---|---|---|---|"
            for name in names:
                first, wrong = FIELDS[name]
                for key in (SEARCH, name, ENTER, ESCAPE, first):
                    terminal.press(key)
                    terminal.read(0.5)
                terminal.read(SETTLE_SECONDS)
                pairs = {wrong: wrong, "backspace": BACKSPACE}
                measured: dict[str, list[tuple[float, float]]] = {label: [] for label in pairs}
                for _ in range(rounds):
                    for label, key in pairs.items():
                        measured[label].append(key_milliseconds(terminal, key))
                for label, values in measured.items():
                    typed, rest = (statistics.median(column) for column in zip(*values, strict=True))
                    yield f"| {name} | {label} | {typed:.1f} | {rest:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fields", nargs="*", help=f"fields to measure: {', '.join(FIELDS)}; default all")
    parser.add_argument("--size", default="120x34", help="columns and rows of the terminal")
    parser.add_argument("--rounds", type=int, default=5, help="presses of each key")
    parser.add_argument("--all", action="store_true", help="show all fields, not only the common ones")
    options = parser.parse_args()
    columns, rows = map(int, options.size.split("x"))
    for line in measure((columns, rows), options.fields or list(FIELDS), options.rounds, show_all=options.all):
        print(line, flush=True)


if __name__ == "__main__":
    main()
