"""Record a run on a full file system, the folder of the first argument. `test_recorder` mounts it."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path

from engine.base.errors import UsageError
from engine.config.schema import Config
from engine.runs import ownership as ownership_module
from engine.runs.control import consume_requests, send_request
from engine.runs.events import Event, RunFinished, StepEvent, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import JournalReader
from engine.runs.ownership import claim_run
from engine.runs.recorder import Recorder
from engine.runs.run_row import read_row
from engine.runs.sinks import DISK_PROBLEMS
from support.messages import has_problem
from support.runs.event_factories import make_epoch, make_run_started, make_step


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def main(root: Path) -> None:
    ownership_module.HEARTBEAT_INTERVAL_SECONDS = 0.0
    shown: list[Event] = []
    claimed = claim_run(root, "a", "x", resume=False)
    recorder = Recorder(claimed.folder, Config(), shown.append)
    folder, ownership = RunFolder(root / "a"), claimed.ownership
    recorder.record(make_run_started(time.time() - 60))
    recorder.record(make_epoch(1))
    recorder.record(make_step(1, time=time.time() - 60))
    ownership.renew_heartbeat()

    fill(root / "ballast")
    first = folder.owner.read_text()
    for number in range(2, 1200):
        recorder.record(make_step(number, time=time.time() - 60))
    for number in range(2, 101):
        recorder.record(make_epoch(number, time=time.time() - 60))
    ownership.renew_heartbeat()
    [warning] = [event for event in shown if isinstance(event, WarningEvent)]
    assert warning.code == "not-writable" and f"{root}/a" in warning.message, warning
    assert warning.message.startswith(DISK_PROBLEMS[errno.ENOSPC]), warning
    assert folder.owner.read_text() != first, "the heartbeat goes on"
    row = read_row(folder)
    assert row is not None and row.record.problem == DISK_PROBLEMS[errno.ENOSPC], row
    assert row.state == "running"
    assert row.message.startswith("no news for 1m0"), row.message
    assert DISK_PROBLEMS[errno.ENOSPC] in row.message, row.message

    send_request(folder.control, "stop")
    assert [(request.request, request.by) for request in consume_requests(folder.control)] == [("stop", "uid 0")]

    (root / "ballast").unlink()
    recorder.catch_up()
    assert recorder.problem is None
    steps = [event.step for event in JournalReader(folder.journal).poll() if isinstance(event, StepEvent)]
    assert steps == list(range(1, 1200))
    assert "epoch 100" in folder.log.read_text(), "the log is tried again at once"
    fill(root / "ballast")

    for number in range(100):
        try:
            (root / f"inode-{number}").touch()
        except OSError:
            break
    try:
        send_request(folder.control, "stop")
    except UsageError as error:
        assert has_problem(error.problems, "not-writable", None, "stop", DISK_PROBLEMS[errno.ENOSPC]), error
    else:
        raise AssertionError("nobody received the request")

    for path in root.glob("inode-*"):
        path.unlink()

    for number in range(101, 500):
        recorder.record(make_epoch(number))
    recorder.record(RunFinished(state="stopped", message="done"))
    recorder.close()
    ownership.release()
    *whole, _ = folder.journal.read_bytes().splitlines()
    assert all(json.loads(line) for line in whole), "no torn line but the last"
    last = [event for event in shown if isinstance(event, WarningEvent)][-1]
    assert last.code == "not-recorded" and DISK_PROBLEMS[errno.ENOSPC] in last.message, last
    assert os.statvfs(root).f_bfree * os.statvfs(root).f_frsize < 1 << 16, "the disk was full to the end"
    print("all seen")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
