"""Standard streams that are closed or full, a deleted working folder, few descriptors, and signals at the start."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.messages import says

BEGIN = "import os, sys\nfrom engine.base.entry_point import begin_process, reported_faults\nbegin_process()\n"
PRINT_FILE = (
    BEGIN
    + "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
    + """
print("data", flush=True)
print("message", file=sys.stderr, flush=True)
os.system("echo from a child; echo from a child >&2; cat")
os.write(file, str(file).encode())
"""
)
READY = "os.write(1, b'ready\\n')\n"
DISK_FULL = os.strerror(errno.ENOSPC)


def reports(stderr: str, code: str, *values: str) -> bool:
    """Whether stderr is one line with an error message of this code."""
    return stderr.startswith("error: ") and stderr.count("\n") == 1 and says(stderr, code, *values)


def run(program: str, redirections: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program through a shell that redirects its descriptors."""
    script = f'exec "$@" {redirections}' if redirections.startswith((">", "<", "2")) else f'{redirections}\nexec "$@"'
    return subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-P", "-c", program, *map(str, arguments)],
        cwd=folder,
        # Unbuffered output fails in `print` and not at the end.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_not_reused_for_files(tmp_path: Path, closed: str) -> None:
    done = run(PRINT_FILE, closed, tmp_path / "file", folder=tmp_path)
    assert done.returncode == 0
    assert int((tmp_path / "file").read_text()) > 2
    assert done.stdout == ("" if ">&- 2" in closed or closed == ">&-" else "data\nfrom a child\n")
    assert done.stderr == ("" if "2>&-" in closed else "message\nfrom a child\n")


@pytest.mark.parametrize("size", [10, 100_000])
def test_full_stdout_is_reported_in_one_sentence(tmp_path: Path, size: int) -> None:
    done = run(BEGIN + f"with reported_faults(): print('x' * {size})", ">/dev/full", folder=tmp_path)
    assert done.returncode == 1 and reports(done.stderr, "not-writable", "stdout", DISK_FULL)


def test_closed_pipe_ends_without_message(tmp_path: Path) -> None:
    pipe = f'{sys.executable} -P -c "$1" | true; exit ${{PIPESTATUS[0]}}'
    program = BEGIN + "with reported_faults():\n    while True: print('x')"
    done = subprocess.run(
        ["bash", "-c", pipe, "sh", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_deleted_working_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    program = BEGIN + "with reported_faults(): open('relative')"
    done = run(program, "mkdir gone; cd gone; rmdir ../gone", folder=tmp_path)
    assert done.returncode == 2 and reports(done.stderr, "not-found")


def test_exhausted_descriptors_are_reported_in_one_sentence(tmp_path: Path) -> None:
    program = BEGIN + "with reported_faults(): files = [open('/dev/null') for _ in range(99)]"
    done = run(program, "ulimit -n 20", folder=tmp_path)
    assert done.returncode == 1 and reports(done.stderr, "limit-too-low", "`ulimit -n 1024`")


@pytest.mark.parametrize("options", ["-Urpf", "-Urm"], ids=["of another namespace", "not mounted"])
def test_unusable_proc_is_reported_before_a_command_begins(tmp_path: Path, options: str) -> None:
    unshare = [shutil.which("unshare") or "unshare", options, "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("unprivileged namespaces are not available")
    cover = "mount -t tmpfs none /proc; " if options == "-Urm" else ""
    command = [*unshare, "sh", "-c", f'{cover}exec "$@"', "sh", sys.executable, "-P", "-c"]
    done = subprocess.run(
        [*command, BEGIN + "with reported_faults(): print('begun')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert reports(done.stderr, "not-supported", "`mount -t proc proc /proc`")


BLOCK_IN_C = READY + "sum(range(1 << 60))"
BLOCK_IN_COMMAND = f"""
with reported_faults():
    try:
        {READY.strip()}
        while True: pass
    finally:
        print("cleaned up", flush=True)
"""


def signal_when_ready(program: str, number: int, *prefix: str) -> tuple[int, str]:
    """Send a signal to a program once it is ready. Return its exit code and what it prints after that."""
    command = [*prefix, sys.executable, "-P", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            return process.wait(60), process.stdout.read()
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_start_of_a_command_at_once(number: int) -> None:
    assert signal_when_ready(BEGIN + BLOCK_IN_C, number) == (-number, "")


def test_sigint_lets_a_command_clean_up_and_shows_no_traceback() -> None:
    assert signal_when_ready(BEGIN + BLOCK_IN_COMMAND, signal.SIGINT) == (-signal.SIGINT, "cleaned up\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_first_process_of_a_container(number: int) -> None:
    unshare = [shutil.which("unshare") or "unshare", "-Urpf", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("unprivileged PID namespaces are not available")
    program = BEGIN + f"with reported_faults():\n    assert os.getpid() == 1\n    os.kill(1, {number})\n"
    program += "    import time; time.sleep(60)"
    done = subprocess.run([*unshare, sys.executable, "-P", "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (128 + number, b"")
