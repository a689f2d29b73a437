"""Every command under closed and full streams, a deleted folder, few descriptors and an unknown user: it works, or ends
with one sentence."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import pytest

from support.gputrain_command import GPUTRAIN, FinishedRun, SharedGputrain

FAULTS = {
    "stdin closed": 'exec "$@" <&-',
    "stdout closed": 'exec "$@" >&-',
    "stderr closed": 'exec "$@" 2>&-',
    "all closed": 'exec "$@" <&- >&- 2>&-',
    "stdout full": 'exec "$@" >/dev/full',
    "stderr full": 'exec "$@" 2>/dev/full',
    "both full": 'exec "$@" >/dev/full 2>&1',
    "folder deleted": 'mkdir gone; cd gone; rmdir ../gone; exec "$@"',
    "few descriptors": 'ulimit -n 20; exec "$@"',
    "no descriptors for a child": 'ulimit -n 8; exec "$@"',
    "unknown user": 'exec env -u HOME -u USER -u LOGNAME unshare -U --map-user 12345 --map-group 12345 "$@"',
}
COMMANDS = (
    "--version",
    "runs",
    "gpus",
    "config digits",
    "queue",
    "compare digits",
    "logs digits",
    "stop digits",
    "resume --headless digits",
    "sweep digits --trials 1 run.epochs=1 optim.lr=0.1..0.2",
    "run --headless --no-such-option",
    "run --headless digits --epochs 1 --model linear",
    "run --dry-run digits --model linear",
)


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "fault"), list(product(COMMANDS, FAULTS)))
def test_command_works_or_ends_with_one_sentence(
    shared_gputrain: SharedGputrain, digits_run: FinishedRun, tmp_path: Path, command: str, fault: str
) -> None:
    if fault == "unknown user" and subprocess.run(["unshare", "-U", "true"], check=False).returncode != 0:
        pytest.skip("unprivileged user namespaces are not available")
    done = subprocess.run(
        ["sh", "-c", FAULTS[fault], "sh", GPUTRAIN, *command.split()],
        cwd=tmp_path,
        env=shared_gputrain.environment | {"GPUTRAIN_RUNS": str(shared_gputrain.runs)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    if done.returncode != 0 and fault not in ("stderr closed", "all closed", "stderr full", "both full"):
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.name != "runs"]
