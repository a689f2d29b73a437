"""Messages of real runs to a local server; a network that is slow or gone delays nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.gputrain_command import Gputrain, wait_for
from support.messages import says
from support.servers.notify_server import PASSWORD, hanging_server, notify_server

RUN = ["run", "--headless", "digits", "--ranks", "1"]


def files_that_contain(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.nightly
def test_killed_run_is_reported_by_who_notices_and_resumed_run_by_its_owner(gputrain: Gputrain) -> None:
    with notify_server() as server:
        gputrain.environment["NTFY"] = server.url
        supervisor = gputrain.start(*RUN, "--epochs", "400", "--name", "night", "notify.urls=env:NTFY")
        gputrain.wait_for_event("night", "checkpoint")
        # No URL in the command line of any process.
        assert not any(PASSWORD in " ".join(process.cmdline()) for process in gputrain.processes())
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.communicate()
        wait_for(lambda: "crashed" in gputrain("runs", "show", "night").stdout, "the end of the ranks")
        wait_for(lambda: bool(server.received), "the message about the crash")
        assert server.titles[0].startswith("night crashed on ")
        assert f"gputrain resume night --runs-dir {gputrain.runs}" in server.received[0]["message"]

        done = gputrain("resume", "night", "--headless", "run.epochs=1", "notify.when=[finished]")
        assert done.returncode == 0, done.stderr
    assert [title.partition(" on ")[0] for title in server.titles] == ["night crashed", "night finished"]
    assert files_that_contain(gputrain.folder, PASSWORD) == []
    assert "finished: env:NTFY (JSON at 127.0.0.1): sent" in (gputrain.runs / "night" / "notify.log").read_text()


@pytest.mark.nightly
def test_hanging_server_and_missing_variable_do_not_delay_training(gputrain: Gputrain) -> None:
    with hanging_server() as server:
        gputrain.environment["NTFY"] = f"{server.url}?rto=600"
        arguments = ["--epochs", "1", "--name", "quick", "notify.urls=[env:NTFY, env:UNSET_URL]"]
        refused = gputrain(*RUN, *arguments)
        assert refused.returncode == 2
        assert says(refused.stderr, "missing-value", "error: notify.urls: ", "env:UNSET_URL")
        assert not gputrain.runs.exists()
        done = gputrain(*RUN, *arguments, "--resume")
        assert done.returncode == 0, done.stderr
        assert says(done.stderr, "missing-value", "warning: ", "UNSET_URL")


def test_notify_test_command_reports_each_destination(gputrain: Gputrain) -> None:
    nowhere = gputrain("doctor", "--send-test-message")
    assert nowhere.returncode == 2
    assert says(nowhere.stderr, "missing-value", "error: notify.urls: ")
    with notify_server() as server, notify_server(500) as broken:
        gputrain.environment["NTFY"] = server.url
        file = Path(gputrain.environment["XDG_CONFIG_HOME"]) / "gputrain" / "notify"
        file.parent.mkdir(parents=True)
        file.write_text(f"{broken.url}\n")
        file.chmod(0o600)
        done = gputrain("doctor", "digits", "notify.urls=env:NTFY", "--send-test-message")
    assert done.returncode == 1
    assert done.stdout == "env:NTFY (JSON at 127.0.0.1): sent\n"
    assert done.stderr.startswith(f"file:{file} line 1 (JSON at 127.0.0.1): ")
    assert len(server.received) == 1
    assert PASSWORD not in done.stdout + done.stderr
