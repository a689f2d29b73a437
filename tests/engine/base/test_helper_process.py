"""Helper processes: the parent always gets an answer or an error, and no process remains."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import psutil
import pytest

from engine.base.helper_process import (
    HelperError,
    HelperExitedError,
    HelperProcess,
    HelperTimeoutError,
    start_helper,
)
from support.gputrain_command import wait_for

PATIENCE_SECONDS = 30.0

Start = Callable[[str], HelperProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a helper whose ``main(parent)`` has the given lines. It prints on import."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(lines: str) -> HelperProcess:
        body = "".join(f"    {line}\n" for line in lines.splitlines())
        (tmp_path / "helper_stub.py").write_text(
            f"import os, sys, time\nprint('imported', flush=True)\ndef main(parent):\n{body}"
        )
        return start_helper("helper_stub")

    return start


def assert_exits(helper: HelperProcess, value: str) -> HelperExitedError:
    with helper, pytest.raises(HelperExitedError) as error:
        helper.receive(str, PATIENCE_SECONDS)
    assert value in str(error.value)
    return error.value


def test_helper_answers_each_request(start: Start) -> None:
    with start("for request in parent.requests(int): parent.send({'twice': 2 * request})") as helper:
        for number in (1, 2):
            helper.send(number)
            assert helper.receive(dict[str, int], PATIENCE_SECONDS) == {"twice": 2 * number}


def test_helper_receive_times_out_and_hung_helper_is_killed_on_exit(start: Start) -> None:
    with start("time.sleep(1000)") as helper:
        with pytest.raises(HelperTimeoutError, match="0 s"):
            helper.receive(str, 0.1)
        child = psutil.Process(helper._process.pid)
    assert not child.is_running()
    assert helper.exit_code() == -signal.SIGKILL


def test_helper_close_kills_grandchildren(start: Start) -> None:
    with start("import subprocess\nparent.send(subprocess.Popen(['sleep', '1000']).pid)\ntime.sleep(1000)") as helper:
        grandchild = psutil.Process(helper.receive(int, PATIENCE_SECONDS))
    wait_for(
        lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE, "the end of the grandchild"
    )


def test_helper_error_names_signal(start: Start) -> None:
    assert assert_exits(start("os.kill(os.getpid(), 9)"), "SIGKILL").exit_code == -9
    number = signal.SIGRTMIN + 1
    assert_exits(start(f"os.kill(os.getpid(), {number})"), f" {number}")


def test_helper_error_of_silent_exit_names_exit_code(start: Start) -> None:
    helper = HelperProcess("raise SystemExit(7)")
    assert assert_exits(helper, " 7").exit_code == 7


def test_helper_receive_reports_exit_before_request(start: Start) -> None:
    helper = start("os._exit(0)")
    assert helper.exit_code(PATIENCE_SECONDS) == 0
    helper.send("anybody there?")
    assert assert_exits(helper, " 0").last_line == "imported"


def test_helper_answers_are_separate_from_stdout_and_stdin(start: Start) -> None:
    lines = "print('hello')\nos.write(1, b'{')\nparent.send(sys.stdin.read())\nos.system('echo [1]')\nparent.send(2)"
    with start(lines) as helper:
        assert helper.receive(str, PATIENCE_SECONDS) == ""
        assert helper.receive(int, PATIENCE_SECONDS) == 2


def test_helper_receive_waits_for_complete_line() -> None:
    program = "import sys; print('[1, ', end='', flush=True); sys.stdin.readline(); print('2]\\n[3', end='')"
    with HelperProcess(program) as helper:
        with pytest.raises(HelperTimeoutError):
            helper.receive(list[int], 1.0)
        helper.send(None)
        assert helper.receive(list[int], PATIENCE_SECONDS) == [1, 2]
        with pytest.raises(HelperExitedError) as ended:
            helper.receive(list[int], PATIENCE_SECONDS)
        assert ended.value.exit_code == 0


def test_helper_read_lines_returns_all_complete_lines() -> None:
    with HelperProcess(r"import os, time; os.write(1, b'a\nb\n'); time.sleep(1000)", keep_stderr=False) as helper:
        assert helper.read_lines(PATIENCE_SECONDS) == [b"a", b"b"]
        with pytest.raises(HelperTimeoutError):
            helper.read_lines(0.0)


def test_helper_receives_request_larger_than_pipe(start: Start) -> None:
    large = "x" * (1 << 20)
    with start("time.sleep(0.2)\nparent.send(len(parent.receive(str)))") as helper:
        helper.send(large)
        assert helper.receive(int, PATIENCE_SECONDS) == len(large)


def test_helper_kill_from_another_thread_ends_receive(start: Start) -> None:
    helper = start("time.sleep(1000)")
    Timer(0.2, helper.kill).start()
    assert_exits(helper, "SIGKILL")


def test_helper_dies_with_its_parent(start: Start, tmp_path: Path) -> None:
    start("open('pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)").close()
    program = "from engine.base.helper_process import start_helper; start_helper('helper_stub').receive(str)"
    parent = psutil.Popen([sys.executable, "-c", program], cwd=tmp_path)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the helper")
    helper = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    wait_for(lambda: not helper.is_running(), "the helper's end")


def test_helper_imports_nothing_from_working_folder(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "json.py").write_text("raise ImportError('not the library')\n")
    monkeypatch.chdir(tmp_path / "work")
    with start("parent.send(sys.argv)") as helper:
        assert helper.receive(list[str], PATIENCE_SECONDS) == ["-c"]


def test_helper_receive_refuses_answer_of_another_kind() -> None:
    with HelperProcess(r"import os; os.write(1, b'[1]\n')") as helper, pytest.raises(HelperError):
        helper.receive(str, PATIENCE_SECONDS)


def test_helper_receive_timeout_ignores_lines_that_are_not_json(start: Start) -> None:
    # Lines that are not JSON do not restart the timeout.
    with HelperProcess("import time\nwhile True: print('rubbish', flush=True); time.sleep(0.05)") as helper:
        start_time = time.monotonic()
        with pytest.raises(HelperTimeoutError):
            helper.receive(str, 0.5)
        assert time.monotonic() - start_time < 10
