"""Benchmark the screens in a pseudo-terminal: `python tests/bench/screen.py [--rounds N] [--nvitop PATH]`.

Measures the CPU time of a key on every screen, the time to the first picture, and the load of a screen that is left
open, on a server with eight GPUs of the fake driver (`fake_nvml.c`) and 300 runs (`--runs`). Compares with bare Textual
apps (`bare_textual.py`), with `--before PATH` with another gputrain-tui, and, if it is installed, with nvitop. Every
program is driven through its terminal: keys in, output and CPU time out. Prints Markdown.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.config.schema import fields
from support.screen.busy_server import COMPARED_RUNS, MEMORY_SHOWN, SHOWN_RUN, BusyServer
from support.screen.pseudo_terminal import PseudoTerminal

COLUMNS, ROWS = 160, 48
RUNS = 300
SETTLE_SECONDS = 3.0
# The runs are listed before the first key, also if there are thousands.
RUNS_PER_SECOND = 500
KEY_SECONDS = 0.2
"""Time to process a key. The screen refreshes once per second, so most keys are measured without a refresh."""
TICK_SECONDS = 1.0
TUI = str(Path(sys.executable).with_name("gputrain-tui"))
BARE = str(Path(__file__).with_name("bare_textual.py"))
DOWN, UP, RIGHT, LEFT, PAGE_DOWN = "\x1b[B", "\x1b[A", "\x1b[C", "\x1b[D", "\x1b[6~"


@dataclass(frozen=True)
class Screen:
    """A screen of gputrain: the keys that open it from the monitor, and each measured key with its bare counterpart."""

    name: str
    open_keys: Sequence[str]
    keys: dict[str, tuple[str, str]]
    """Label of a key: what is written to the terminal, and the bare app that gets the same key."""


LIST, TABLE, FORM = f"list {RUNS}", f"table {RUNS}", f"form {len(list(fields()))}"
MOVES = {"down": (DOWN, LIST), "up": (UP, LIST)}
SIDES = {"left": (LEFT, FORM), "right": (RIGHT, FORM)}
CHART_KEYS = SIDES | {
    "m": ("m", FORM), "x": ("x", FORM), "tab": ("\t", FORM), "log scale": ("L", FORM), "zoom in": ("+", FORM),
    "pan": (",", FORM), "all": ("0", FORM), "full": ("f", FORM),
}  # fmt: skip
LIVE_KEYS = ("\t\t\r",)
SHOWN_KEYS = ("r", "/", SHOWN_RUN, "\r", "\r")
SCREENS = (
    Screen("monitor", (), MOVES | {"tab": ("\t", FORM), "space": (" ", LIST)}),
    Screen("gpu", ("\r",), SIDES | {"space": (" ", FORM), "tab": ("\t", FORM)}),
    Screen(
        "runs",
        ("r",),
        {
            "down": (DOWN, TABLE), "up": (UP, TABLE), "page down": (PAGE_DOWN, TABLE), "mark": (" ", TABLE),
            "mark all": ("M", TABLE),
        },
    ),
    Screen("queue", ("Q",), MOVES | {"move down": ("J", LIST), "move up": ("K", LIST)}),
    Screen("run", LIVE_KEYS, CHART_KEYS),
    Screen("log", (*SHOWN_KEYS, "l"), MOVES | {"page down": (PAGE_DOWN, LIST)}),
    Screen("config", (*LIVE_KEYS, "d"), MOVES | {"page down": (PAGE_DOWN, LIST)}),
    Screen("profile", (*SHOWN_KEYS, "P"), MOVES),
    Screen("confusion", (*SHOWN_KEYS, "v"), SIDES | MOVES | {"order": ("o", LIST), "tab": ("\t", FORM)}),
    Screen("mistakes", (*SHOWN_KEYS, "v", "\r"), SIDES | MOVES),
    Screen("compare", ("r", "/", COMPARED_RUNS, "\r", "M", "c"), CHART_KEYS | MOVES),
    Screen("sweep", ("r", "S"), MOVES | {"order": ("o", LIST)}),
    Screen(
        "form", ("n", "\x0f", "\t\t"), {"letter": ("a", FORM), "backspace": ("\x7f", FORM), "tab": ("\t", FORM)}
    ),
    Screen("help", ("?",), MOVES | {"page down": (PAGE_DOWN, LIST)}),
)  # fmt: skip


@contextmanager
def make_server(runs: int) -> Iterator[BusyServer]:
    with tempfile.TemporaryDirectory(prefix="gputrain-bench-") as folder, BusyServer(Path(folder), runs) as server:
        yield server


def open_screen(server: BusyServer, keys: Sequence[str], program: str = TUI) -> PseudoTerminal:
    """Start gputrain-tui and press the keys that open a screen."""
    terminal = PseudoTerminal([program], COLUMNS, ROWS, server.environment)
    terminal.seconds_until(MEMORY_SHOWN)
    terminal.read(SETTLE_SECONDS + server.runs / RUNS_PER_SECOND)
    for key in keys:
        terminal.press(key)
        terminal.read(SETTLE_SECONDS)
    return terminal


def bare_app(server: BusyServer, arguments: str) -> PseudoTerminal:
    terminal = PseudoTerminal([sys.executable, BARE, *arguments.split()], COLUMNS, ROWS, server.environment)
    terminal.seconds_until("ready")
    terminal.read(SETTLE_SECONDS)
    return terminal


def key_milliseconds(terminal: PseudoTerminal, key: str) -> float:
    """CPU time in milliseconds from a key until the program is idle again."""
    start = terminal.cpu_seconds()
    terminal.press(key)
    terminal.read(KEY_SECONDS)
    return 1000 * (terminal.cpu_seconds() - start)


def measure_keys(server: BusyServer, screens: Sequence[Screen], presses: int, before: str | None) -> Iterator[str]:
    """Yield a row per key. All programs get a key one after the other, so that they run under the same load."""
    title, line = ("| before (ms) ", "|---") if before is not None else ("", "")
    yield f"| screen | key | CPU time (ms) {title}| bare Textual (ms) | ratio |\n|---|---|---{line}|---|---|"
    for screen in screens:
        with ExitStack() as stack:
            ours = stack.enter_context(open_screen(server, screen.open_keys))
            earlier = None if before is None else stack.enter_context(open_screen(server, screen.open_keys, before))
            bare = {name: bare_app(server, name) for name in sorted({app for _, app in screen.keys.values()})}
            for terminal in bare.values():
                stack.enter_context(terminal)
            for label, (key, app) in screen.keys.items():
                driven = [ours, *([] if earlier is None else [earlier]), bare[app]]
                times = [[key_milliseconds(terminal, key) for terminal in driven] for _ in range(presses)]
                mine, *others, theirs = (statistics.median(values) for values in zip(*times, strict=True))
                cells = [screen.name, label, f"{mine:.1f}", *(f"{other:.1f}" for other in others)]
                yield f"| {' | '.join(cells)} | {theirs:.1f} ({app.split()[0]}) | {mine / theirs:.2f} |"


def measure_start(server: BusyServer, rounds: int, nvitop: str | None, before: str | None) -> Iterator[str]:
    label = [sys.executable, BARE, "label"]
    programs: dict[str, tuple[list[str], str]] = {
        "one-widget Textual app: first picture": (label, "ready"),
        "gputrain-tui: first picture": ([TUI], "quit"),
        "gputrain-tui: first GPU": ([TUI], MEMORY_SHOWN),
    }
    if before is not None:
        programs["before: first picture"] = ([before], "quit")
    if nvitop is not None:
        programs["nvitop: first GPU"] = ([nvitop], MEMORY_SHOWN)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for round_number in range(rounds + 1):
        for name, (command, pattern) in programs.items():
            with PseudoTerminal(command, COLUMNS, ROWS, server.environment) as terminal:
                taken = (terminal.seconds_until(pattern), terminal.cpu_seconds())
            # The first round warms up caches.
            measured[name] += [taken] if round_number else []
    yield "| | seconds | range | ratio | CPU time (s) | ratio |\n|---|---|---|---|---|---|"
    references: tuple[float, ...] = ()
    for name, values in measured.items():
        seconds, cpu_seconds = zip(*values, strict=True)
        medians = (statistics.median(seconds), statistics.median(cpu_seconds))
        references = references or medians
        wall, cpu = (median / reference for median, reference in zip(medians, references, strict=True))
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        yield f"| {name} | {medians[0]:.3f} | {spread} | {wall:.2f} | {medians[1]:.3f} | {cpu:.2f} |"


@dataclass
class OpenProgram:
    """A program that is left open: its terminal, and its processes with their CPU time at the start."""

    name: str
    terminal: PseudoTerminal

    def __post_init__(self) -> None:
        root = psutil.Process(self.terminal.process.pid)
        self._processes = [root, *root.children(recursive=True)]

    def cpu_seconds(self) -> list[float]:
        """CPU time of the program itself, and of all its processes."""
        times = [time.clock_gettime(~process.pid << 3 | 2) for process in self._processes]
        return [times[0], sum(times)]


def measure_idle(server: BusyServer, seconds: float, nvitop: str | None, before: str | None) -> Iterator[str]:
    """All programs are open at the same time, so that they measure under the same load of the machine."""
    opened: dict[str, Callable[[], PseudoTerminal]] = {}
    for program, tui in {"gputrain-tui": TUI, "before": before}.items():
        if tui is not None:
            for name, keys in {"monitor": (), "run": LIVE_KEYS, "help over a run": (*LIVE_KEYS, "?")}.items():
                opened[f"{program}, {name}"] = partial(open_screen, server, keys, tui)
    if nvitop is not None:
        command = [nvitop, "--interval", "1"]
        opened["nvitop"] = lambda: PseudoTerminal(command, COLUMNS, ROWS, server.environment)
    with ExitStack() as stack:
        terminals = {name: stack.enter_context(start()) for name, start in opened.items()}
        for terminal in terminals.values():
            terminal.read(SETTLE_SECONDS)
        programs = [OpenProgram(name, terminal) for name, terminal in terminals.items()]
        started = {program.name: program.cpu_seconds() for program in programs}
        counts = dict.fromkeys(terminals, 0)
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            for name, terminal in terminals.items():
                counts[name] += len(terminal.read(0.1))
        elapsed = time.monotonic() - start
        yield "| left open, 1 Hz | CPU of the program | a tick (ms) | with its GPU sampler | bytes per second |"
        yield "|---|---|---|---|---|"
        for program in programs:
            pairs = zip(program.cpu_seconds(), started[program.name], strict=True)
            own, total = ((after - earlier) / elapsed for after, earlier in pairs)
            tick = f"{1000 * own * TICK_SECONDS:.1f}"
            yield f"| {program.name} | {own:.2%} | {tick} | {total:.2%} | {counts[program.name] / elapsed:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("keys", "start", "idle"), help="measure only this part")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the start, and thirds of the presses of a key")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the screens are left open")
    parser.add_argument("--nvitop", default=shutil.which("nvitop"), help="path of nvitop, if it is not in PATH")
    parser.add_argument("--runs", type=int, default=RUNS, help="number of ended runs")
    parser.add_argument("--before", help="path of another gputrain-tui, which gets the same keys")
    names = [screen.name for screen in SCREENS]
    parser.add_argument("--screen", action="append", choices=names, help="measure only the keys of this screen")
    options = parser.parse_args()
    screens = [screen for screen in SCREENS if options.screen is None or screen.name in options.screen]
    with make_server(options.runs) as server:
        parts = {
            "start": lambda: measure_start(server, options.rounds, options.nvitop, options.before),
            "keys": lambda: measure_keys(server, screens, 3 * options.rounds, options.before),
            "idle": lambda: measure_idle(server, options.seconds, options.nvitop, options.before),
        }
        for name, measure in parts.items():
            if options.only in (None, name):
                for line in measure():
                    print(line, flush=True)
                print()


if __name__ == "__main__":
    main()
