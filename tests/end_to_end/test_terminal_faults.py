"""What a terminal does to a screen: it resizes, hangs up, stops reading, sends bytes of any value, and signals."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.gputrain_command import GPUTRAIN, Gputrain, wait_for
from support.screen.terminal import Terminal

SCREEN = str(Path(GPUTRAIN).with_name("gputrain-tui"))
# With the whole footer.
SIZES = [(100, 24), (120, 34), (151, 48), (160, 59), (218, 48)]
# A terminal after a reattach, a program that sends Latin-1, half a sequence, mouse reports that are cut or overflow.
BAD_BYTES = b"\x1b[M C\x84*\x84\xff\xc3(\x1b[<99999999999999999999;1;1M\x1b[<M\x1b[1;\x1b]52;\x1b_G\xf0\x9f\x1b[M\x80"


@dataclass(frozen=True)
class OpenScreen:
    """A command that opens a screen, and a text of it."""

    command: tuple[str, ...]
    text: str


SCREENS = {
    "monitor": OpenScreen((SCREEN,), "live"),
    "demo": OpenScreen((SCREEN, "--demo"), "digits-3"),
    "attach": OpenScreen((GPUTRAIN, "attach", "live"), "processes"),
    "attach training": OpenScreen((GPUTRAIN, "attach", "trained"), "ranks on the CPU"),
    "resume": OpenScreen((GPUTRAIN, "resume", "trained", "--epochs", "100000"), "epoch"),
    "run": OpenScreen((GPUTRAIN, "run", "digits", "--ranks", "1", "--epochs", "100000", "--name", "new"), "epoch"),
    # A chart that a key has hidden stays hidden.
    "watch": OpenScreen((GPUTRAIN, "watch", "logs"), "1 metric"),
}
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in SCREENS if name != "monitor"]


@pytest.fixture
def live(gputrain: Gputrain) -> Iterator[Gputrain]:
    """A command with runs and a live run, which must survive whatever happens to a screen."""
    (gputrain.folder / "logs").mkdir()
    (gputrain.folder / "logs" / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.25\n")
    supervisor = gputrain.start("run", "--headless", "--gpus", "cpu", "--name", "live", "--", "sleep", "100000")
    gputrain.wait_for_event("live", "command_started")
    yield gputrain
    assert supervisor.poll() is None, "the run ended"
    for run in gputrain.runs.iterdir():
        gputrain("stop", run.name)
    supervisor.wait(60)


def prepare(gputrain: Gputrain, name: str) -> None:
    """Make what the command of a screen needs, and end what it has started before."""
    if "trained" in SCREENS[name].command and not (gputrain.runs / "trained").exists():
        done = gputrain("run", "digits", "--headless", "--ranks", "1", "--epochs", "1", "--name", "trained")
        assert done.returncode == 0, done.stderr
    if name in ("run", "resume"):
        gputrain("stop", "trained" if name == "resume" else "new")
        shutil.rmtree(gputrain.runs / "new", ignore_errors=True)


def open_screen(gputrain: Gputrain, name: str, *, controlling: bool = True) -> Terminal:
    """Open a screen and wait until it is drawn."""
    prepare(gputrain, name)
    terminal = Terminal(gputrain, *SCREENS[name].command, controlling=controlling)
    terminal.wait_for(SCREENS[name].text)
    return terminal


def stall(terminal: Terminal) -> None:
    """Draw without reading until the terminal takes no more output."""
    waiting, sizes = [-1], itertools.cycle(SIZES)

    def is_full() -> bool:
        terminal.resize(*next(sizes))
        time.sleep(0.2)
        size = struct.unpack("i", fcntl.ioctl(terminal.master, termios.FIONREAD, bytes(4)))[0]
        waiting.append(size)
        return size > 0 and len(waiting) > 8 and len(set(waiting[-4:])) == 1

    wait_for(is_full, "a full terminal")


def hang_up(terminal: Terminal) -> None:
    terminal.hang_up()


def hang_up_stalled(terminal: Terminal) -> None:
    stall(terminal)
    terminal.hang_up()


def terminate(terminal: Terminal) -> None:
    terminal.process.send_signal(signal.SIGTERM)


def terminate_twice(terminal: Terminal) -> None:
    for _ in range(2):
        terminal.process.send_signal(signal.SIGTERM)


def terminate_stalled(terminal: Terminal) -> None:
    stall(terminal)
    terminate(terminal)


END_OF_INPUT = "end of input without SIGHUP"
ENDS: dict[str, tuple[Callable[[Terminal], None], int]] = {
    "hangup": (hang_up, signal.SIGHUP),
    "hangup of a stalled terminal": (hang_up_stalled, signal.SIGHUP),
    END_OF_INPUT: (hang_up, signal.SIGHUP),
    "SIGTERM": (terminate, signal.SIGTERM),
    "SIGTERM twice": (terminate_twice, signal.SIGTERM),
    "SIGTERM and a stalled terminal": (terminate_stalled, signal.SIGTERM),
}


def check_end(gputrain: Gputrain, name: str, fault: str) -> None:
    """A screen ends by a fault, restores its terminal, and leaves no process but the runs."""
    end, number = ENDS[fault]
    terminal = open_screen(gputrain, name, controlling=fault != END_OF_INPUT)
    runs = {process.pid for process in gputrain.processes() if not is_screen(process, terminal)}
    end(terminal)
    wait_for(lambda: terminal.process.poll() is not None, "the end of the screen")
    # The second signal may arrive in the last moment, when Python has restored its handlers. Shells show the same code.
    assert terminal.process.returncode in (128 + number, *([-number] if end is terminate_twice else []))
    if end in (terminate, terminate_twice):
        assert terminal.restored()
    if end is not hang_up and end is not hang_up_stalled:
        # Also where the terminal takes no more sequences.
        assert termios.tcgetattr(terminal.slave) == terminal.before
        terminal.hang_up()
    wait_for(lambda: {process.pid for process in gputrain.processes()} <= runs, "the end of its processes")


def is_screen(process: psutil.Process, terminal: Terminal) -> bool:
    """Whether a process is in the session of the terminal: not a run, which has its own."""
    return os.getsid(process.pid) == terminal.process.pid


def test_screen_ends_by_hangup(live: Gputrain) -> None:
    check_end(live, "monitor", "hangup")


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCREENS)
def test_each_screen_ends_by_each_fault(live: Gputrain, name: str) -> None:
    for fault in ENDS:
        check_end(live, name, fault)


def answers(terminal: Terminal) -> None:
    """The screen opens its help and closes it."""
    terminal.resize(120, 40)
    terminal.seen = b""
    terminal.press("?")
    terminal.wait_for("esc close")
    terminal.seen = b""
    terminal.press("\x1b")
    terminal.wait_for("quit")


def interrupt(terminal: Terminal) -> None:
    terminal.press("\x03")
    assert terminal.wait_for_end() == 0
    terminal.hang_up()


def send_bad_bytes(terminal: Terminal) -> None:
    os.write(terminal.master, BAD_BYTES)
    time.sleep(0.3)
    os.write(terminal.master, b"\x1b")


def stop_and_continue(terminal: Terminal) -> None:
    process = psutil.Process(terminal.process.pid)
    process.suspend()
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")
    terminal.seen = b""
    process.resume()
    terminal.wait_for("\x1b[?1049h")
    terminal.wait_for("quit")


def stall_and_read(terminal: Terminal) -> None:
    stall(terminal)
    terminal.seen = b""
    # What was drawn meanwhile is dropped; the next frame is whole.
    terminal.resize(120, 34)
    terminal.wait_for("gputrain")


@pytest.mark.parametrize("name", ["monitor", *NIGHTLY])
def test_screen_survives_faults_of_its_terminal(live: Gputrain, name: str) -> None:
    terminal = open_screen(live, name)
    for fault in (send_bad_bytes, stop_and_continue, stall_and_read):
        fault(terminal)
        answers(terminal)
    interrupt(terminal)


def suspend(gputrain: Gputrain, name: str) -> Terminal:
    """Return the terminal of a shell whose screen was suspended."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    prepare(gputrain, name)
    shell = Terminal(gputrain, bash, "--norc", "--noprofile", "-i", PS1="ready> ")
    shell.wait_for("ready> ")
    shell.press(" ".join(SCREENS[name].command) + "\r")
    shell.wait_for(SCREENS[name].text)
    shell.press("\x1a")
    shell.wait_for("Stopped")
    shell.seen = b""
    return shell


@pytest.mark.parametrize("name", ["monitor", *NIGHTLY])
def test_screen_is_suspended_and_drawn_whole_by_fg(live: Gputrain, name: str) -> None:
    shell = suspend(live, name)
    shell.press("stty -a; fg\r")
    shell.wait_for("icanon")
    assert b"-icanon" not in shell.seen and b"-echo " not in shell.seen
    shell.wait_for(SCREENS[name].text)
    shell.wait_for("quit")
    shell.seen = b""
    shell.press("q")
    shell.wait_for("ready> ")
    shell.press("exit\r")
    shell.wait_for_end()


@pytest.mark.nightly
def test_suspended_screen_ends_by_kill_of_its_shell(live: Gputrain) -> None:
    shell = suspend(live, "monitor")
    screens = [process for process in live.processes() if SCREEN in process.cmdline()]
    # The shell continues the stopped job, which is not in the foreground.
    shell.press("kill %1\r")
    wait_for(lambda: not any(map(psutil.Process.is_running, screens)), "the end of the screen")
    assert screens
    shell.press("exit\r")
    shell.wait_for_end()


def test_ctrl_z_is_refused_where_no_shell_would_continue_the_screen(live: Gputrain) -> None:
    terminal = open_screen(live, "monitor")
    terminal.press("\x1a")
    terminal.wait_for("No shell would")
    answers(terminal)
    interrupt(terminal)


@pytest.mark.parametrize(
    "body",
    ["while True: pass", pytest.param("import time; time.sleep(100000)", marks=pytest.mark.nightly)],
    ids=["spins", "waits"],
)
def test_signal_ends_screen_whose_event_loop_is_stuck(gputrain: Gputrain, body: str) -> None:
    program = (
        "import tui.screens.monitor as monitor\n"
        "def stick(self):\n"
        "    self.app._driver.write('stuck')\n"
        f"    {body}\n"
        "monitor.MonitorScreen.action_select = stick\n"
        "from tui import screen; screen()"
    )
    terminal = Terminal(gputrain, sys.executable, "-c", program)
    terminal.wait_for("No runs yet")
    terminal.press(" ")
    terminal.wait_for("stuck")
    terminate(terminal)
    assert terminal.wait_for_end() == 128 + signal.SIGTERM
    assert terminal.restored()
    terminal.hang_up()
