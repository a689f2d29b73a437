"""Benchmark the screens in a pseudo-terminal: `python tests/bench/screen.py [--rounds N] [--nvitop PATH]`.

Measures the CPU time of a key, the time to the first picture, and the load of a screen that is left open, with eight
GPUs of the fake driver (`fake_nvml.c`) and 300 runs. Compares with bare Textual apps (`bare_textual.py`) and, if it is
installed, nvitop. Every program is driven through its terminal: keys in, output and CPU time out. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.config.loader import validate_config
from engine.config.schema import as_dict, fields
from engine.config.yaml_io import to_yaml
from engine.runs.events import GpuEvent, RunFinished, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import Journal
from engine.runs.ownership import Ownership
from engine.runs.records import GpuSample, RankDevice
from support.gpu.fake_gpu_host import FakeGpuHost, build_fake_driver, gpu_line, gpu_uuid
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.screen.pseudo_terminal import PseudoTerminal

COLUMNS, ROWS = 160, 48
GPUS, RUNS, RANKS = 8, 300, 4
LIVE_RUN = "live"
MEMORY_MIB, MEMORY_SHOWN = 61000, r"59\.[56]|61000MiB"
SETTLE_SECONDS = 3.0
KEY_SECONDS = 0.2
"""Time to process a key. The screen refreshes once per second, so most keys are measured without a refresh."""
EPOCHS, STEPS_PER_EPOCH, LOG_EVERY, STEP_SECONDS = 30, 400, 10, 0.05
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
SCREENS = (
    Screen("monitor", (), {"down": (DOWN, LIST), "up": (UP, LIST), "tab": ("\t", FORM), "space": (" ", LIST)}),
    Screen("runs", ("r",), {"down": (DOWN, TABLE), "up": (UP, TABLE), "page down": (PAGE_DOWN, TABLE)}),
    Screen(
        "run",
        ("\t\t\r",),
        {"left": (LEFT, FORM), "right": (RIGHT, FORM), "m": ("m", FORM), "x": ("x", FORM), "tab": ("\t", FORM)},
    ),
    Screen(
        "form", ("n", "\x0f", "\t\t"), {"letter": ("a", FORM), "backspace": ("\x7f", FORM), "tab": ("\t", FORM)}
    ),
)  # fmt: skip


class Server:
    """A server with eight GPUs under varying load, 300 runs, and one of them in training."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self._host = FakeGpuHost(folder, build_fake_driver(folder))
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        state = {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CONFIG", "CACHE")}
        self.environment = kept | self._host.environment | state | {"GPUTRAIN_RUNS": str(self.runs)}
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._train, name="server", daemon=True)
        self._set_load(0.0)
        self._make_runs()

    def _set_load(self, now: float) -> None:
        util = [round(70 + 25 * math.sin(now / 3 + index)) if index < 6 else 0 for index in range(GPUS)]
        lines = [
            gpu_line(
                index, name="NVIDIA_H100_80GB_HBM3", util=load, sm=round(0.8 * load), tensor=round(0.4 * load),
                used=MEMORY_MIB, power=100 + 5 * load, temperature=30 + load // 3, memory_util=load // 2,
            )
            for index, load in enumerate(util)
        ]  # fmt: skip
        self._host.set_scene(lines, [f"process {index} {os.getpid()} 60000 compute" for index in range(6)])

    def _make_runs(self) -> None:
        config = to_yaml(as_dict(validate_config({})))
        for number in range(RUNS - 1):
            started = replace(make_run_started(time.time() - 600), name=f"sweep-{number}")
            epochs = [make_epoch(epoch, 0.3 * epoch, time.time() - 500) for epoch in (1, 2, 3)]
            end = RunFinished(time=time.time() - 400, state="failed" if number % 7 == 0 else "finished", message="")
            make_run_folder(self.runs, started.name, started, *epochs, end).config.write_text(config)
        self._devices = [gpu_uuid(rank) for rank in range(RANKS)]
        ranks = [RankDevice(rank, os.uname().nodename, os.getpid(), uuid) for rank, uuid in enumerate(self._devices)]
        live = replace(
            make_run_started(time.time() - 300), name=LIVE_RUN, world_size=RANKS, devices=self._devices, ranks=ranks,
            epochs=EPOCHS, steps_per_epoch=STEPS_PER_EPOCH,
        )  # fmt: skip
        self._live = make_run_folder(self.runs, LIVE_RUN, live)
        self._live.config.write_text(config)
        for folder in (self._live.control, self._live.checkpoints):
            folder.mkdir()

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join()

    def _train(self) -> None:
        """Log a step event every half second, epochs in between, and change the load of the GPUs every second."""
        journal, ownership, step = Journal(self._live.journal), Ownership(RunFolder(self._live.path)), 0
        for _ in range(EPOCHS // 3 * STEPS_PER_EPOCH // LOG_EVERY):
            step = self._log_step(journal, step)
        while not self._stop_event.wait(LOG_EVERY * STEP_SECONDS):
            step = self._log_step(journal, step)
            if step % (2 * LOG_EVERY) == 0:
                self._set_load(time.time())
                ownership.renew_heartbeat()
        journal.close()
        ownership.release()

    def _log_step(self, journal: Journal, step: int) -> int:
        losses = [2.0 * math.exp(-(step + index) / 2000) + 0.1 * math.sin(step + index) for index in range(LOG_EVERY)]
        step += LOG_EVERY
        epoch = (step - 1) // STEPS_PER_EPOCH + 1
        journal.append(StepEvent(step=step, epoch=epoch, losses=losses, lr=0.1, images_per_second=30e3, data_wait=0.01))
        if step % (6 * LOG_EVERY) == 0:
            samples = [
                GpuSample(uuid, os.uname().nodename, "ok", util=95, memory_used=MEMORY_MIB << 20, power=600.0)
                for uuid in self._devices
            ]
            journal.append(GpuEvent(gpus=samples))
        if step % STEPS_PER_EPOCH == 0:
            journal.append(replace(make_epoch(epoch, 1 - 1 / (epoch + 1), time.time()), step=step))
        return step


@contextmanager
def make_server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="gputrain-bench-") as folder, Server(Path(folder)) as server:
        yield server


def open_screen(server: Server, keys: Sequence[str]) -> PseudoTerminal:
    """Start gputrain-tui and press the keys that open a screen."""
    terminal = PseudoTerminal([TUI], COLUMNS, ROWS, server.environment)
    terminal.seconds_until(MEMORY_SHOWN)
    terminal.read(SETTLE_SECONDS)
    for key in keys:
        terminal.press(key)
        terminal.read(SETTLE_SECONDS)
    return terminal


def bare_app(server: Server, arguments: str) -> PseudoTerminal:
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


def measure_keys(server: Server, presses: int) -> Iterator[str]:
    yield "| screen | key | CPU time (ms) | bare Textual (ms) | ratio |\n|---|---|---|---|---|"
    for screen in SCREENS:
        with ExitStack() as stack:
            ours = stack.enter_context(open_screen(server, screen.open_keys))
            bare = {name: bare_app(server, name) for name in sorted({app for _, app in screen.keys.values()})}
            for terminal in bare.values():
                stack.enter_context(terminal)
            for label, (key, app) in screen.keys.items():
                pairs = [(key_milliseconds(ours, key), key_milliseconds(bare[app], key)) for _ in range(presses)]
                mine, theirs = (statistics.median(values) for values in zip(*pairs, strict=True))
                kind = app.split()[0]
                yield f"| {screen.name} | {label} | {mine:.1f} | {theirs:.1f} ({kind}) | {mine / theirs:.2f} |"


def measure_start(server: Server, rounds: int, nvitop: str | None) -> Iterator[str]:
    label = [sys.executable, BARE, "label"]
    programs: dict[str, tuple[list[str], str]] = {
        "one-widget Textual app: first picture": (label, "ready"),
        "gputrain-tui: first picture": ([TUI], "quit"),
        "gputrain-tui: first GPU": ([TUI], MEMORY_SHOWN),
    }
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


def measure_idle(server: Server, seconds: float, nvitop: str | None) -> Iterator[str]:
    """All programs are open at the same time, so that they measure under the same load of the machine."""
    opened: dict[str, Callable[[], PseudoTerminal]] = {
        "gputrain-tui, monitor": lambda: open_screen(server, ()),
        "gputrain-tui, run": lambda: open_screen(server, ("\t\t\r",)),
    }
    if nvitop is not None:
        command = [nvitop, "--interval", "1"]
        opened["nvitop"] = lambda: PseudoTerminal(command, COLUMNS, ROWS, server.environment)
    with ExitStack() as stack:
        terminals = {name: stack.enter_context(start()) for name, start in opened.items()}
        for terminal in terminals.values():
            terminal.read(SETTLE_SECONDS)
        programs = [OpenProgram(name, terminal) for name, terminal in terminals.items()]
        before = {program.name: program.cpu_seconds() for program in programs}
        counts = dict.fromkeys(terminals, 0)
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            for name, terminal in terminals.items():
                counts[name] += len(terminal.read(0.1))
        elapsed = time.monotonic() - start
        yield "| left open, 1 Hz | CPU of the program | with its GPU sampler | bytes per second |\n|---|---|---|---|"
        for program in programs:
            pairs = zip(program.cpu_seconds(), before[program.name], strict=True)
            own, total = ((after - earlier) / elapsed for after, earlier in pairs)
            yield f"| {program.name} | {own:.2%} | {total:.2%} | {counts[program.name] / elapsed:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("keys", "start", "idle"), help="measure only this part")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the start, and thirds of the presses of a key")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the screens are left open")
    parser.add_argument("--nvitop", default=shutil.which("nvitop"), help="path of nvitop, if it is not in PATH")
    options = parser.parse_args()
    with make_server() as server:
        parts = {
            "start": lambda: measure_start(server, options.rounds, options.nvitop),
            "keys": lambda: measure_keys(server, 3 * options.rounds),
            "idle": lambda: measure_idle(server, options.seconds, options.nvitop),
        }
        for name, measure in parts.items():
            if options.only in (None, name):
                for line in measure():
                    print(line, flush=True)
                print()


if __name__ == "__main__":
    main()
