"""The end of a command: the order of the signals, and what the command leaves behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from engine.command.process_tree import CommandProcess
from engine.command.stop import Step, StopSequence
from support.commands import output_of, started, wait_for_output
from support.gputrain_command import wait_for

SHORT = 0.1


def traps(*names: str) -> str:
    """Return the beginning of a script that prints the signals it gets, and ends with none of them."""
    return "".join(f"trap 'echo got {name}' {name}; " for name in names) + "echo ready; "


WAIT = "while :; do sleep 0.02; done"


def wait_until_stopped(stop: StopSequence) -> None:
    wait_for(stop.poll, "the end of the command")


def test_stop_signal_alone_ends_a_command_that_obeys(tmp_path: Path) -> None:
    with started(["sh", "-c", "trap 'echo saved; exit 4' INT; echo ready; " + WAIT], tmp_path) as process:
        stop = StopSequence(process)
        wait_for_output(tmp_path, "ready")
        assert not stop.poll() and stop.step is Step.NONE and stop.seconds_left is None
        stop.request()
        assert stop.seconds_left is not None and stop.seconds_left > 30
        wait_until_stopped(stop)
        assert (process.poll(), stop.step, list(stop.left_behind)) == (4, Step.STOP, [])
    assert output_of(tmp_path) == "ready\nsaved\n"


def test_stop_signal_reaches_the_group_and_no_other_session(tmp_path: Path) -> None:
    script = traps("INT") + f"setsid sh -c '{traps('INT').replace(chr(39), chr(34))} {WAIT}' & " + WAIT
    with started(["sh", "-c", script], tmp_path) as process:
        wait_for(lambda: output_of(tmp_path).count("ready") == 2, "both shells")
        process.signal_group(signal.SIGINT)
        wait_for_output(tmp_path, "got INT")
        time.sleep(0.1)
        assert output_of(tmp_path).count("got INT") == 1


def test_command_that_ignores_sigint_and_sigterm_is_killed(tmp_path: Path) -> None:
    with started(["sh", "-c", traps("INT", "TERM") + WAIT], tmp_path) as process:
        stop = StopSequence(process, grace_s=SHORT)
        wait_for_output(tmp_path, "ready")
        stop.request()
        wait_until_stopped(stop)
        assert (process.poll(), stop.step, process.members()) == (-signal.SIGKILL, Step.KILL, [])
    assert output_of(tmp_path).index("got INT") < output_of(tmp_path).index("got TERM")


def test_second_request_kills_at_once(tmp_path: Path) -> None:
    with started(["sh", "-c", traps("INT", "TERM") + WAIT], tmp_path) as process:
        stop = StopSequence(process)
        wait_for_output(tmp_path, "ready")
        stop.request()
        stop.request()
        wait_until_stopped(stop)
        assert (process.poll(), stop.step) == (-signal.SIGKILL, Step.KILL)
    assert "got TERM" not in output_of(tmp_path)


def test_what_the_command_leaves_behind_is_terminated_and_named(tmp_path: Path) -> None:
    with started(["sh", "-c", "setsid sleep 61 & echo $!; sleep 0.1; exit 3"], tmp_path) as process:
        stop = StopSequence(process)
        wait_until_stopped(stop)
        assert (process.poll(), stop.step, process.members()) == (3, Step.TERMINATE, [])
    assert stop.left_behind == [f"sleep ({output_of(tmp_path).strip()})"]


def test_what_the_command_leaves_behind_and_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = f"setsid sh -c 'trap \"\" TERM; echo ready; {WAIT}' & while ! grep -q ready output.txt; do :; done"
    with started(["sh", "-c", script], tmp_path) as process:
        stop = StopSequence(process, grace_s=600, leftover_grace_s=SHORT)
        wait_until_stopped(stop)
        assert (process.poll(), stop.step, process.members()) == (0, Step.KILL, [])


def test_stopped_process_receives_sigterm(tmp_path: Path) -> None:
    with started(["sh", "-c", "trap 'exit 6' TERM; echo ready; kill -STOP $$; " + WAIT], tmp_path) as process:
        wait_for(lambda: is_stopped(process), "the stop of the command")
        process.end_all(signal.SIGTERM)
        assert process.wait(30) == 6


def is_stopped(process: CommandProcess) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T"
