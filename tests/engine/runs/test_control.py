"""Control requests: who may send them, which files are refused, and what each one changes."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from engine.runs.control import (
    REFUSAL_OUTCOMES,
    ControlRequest,
    RequestCounters,
    consume_requests,
    send_request,
)
from engine.runs.event_lines import event_line
from engine.runs.events import ControlEvent
from support.messages import raises_problem
from support.runs.event_factories import make_run_started
from support.runs.factories import create_invalid_requests, make_run_folder

ANOTHER_USER = 12345


@pytest.fixture
def control_folder(tmp_path: Path) -> Path:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    folder.control.mkdir()
    return folder.control


def change_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make another user the owner of the file, and return that user."""
    if os.geteuid() == 0:
        os.chown(path, ANOTHER_USER, -1)
    else:
        other_user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other_user)
    return path.stat().st_uid


def test_request_counters_say_what_each_request_changes() -> None:
    counters = RequestCounters()
    outcomes = [
        ("continue", "not paused", [0, 0, 0, 0, 0]),
        ("checkpoint", "at the next step", [0, 1, 0, 0, 0]),
        ("pause", "at the next step", [0, 1, 1, 0, 0]),
        ("pause", "already paused", [0, 1, 1, 0, 0]),
        ("continue", "immediately", [0, 1, 2, 0, 0]),
        ("profile", "at the next training step", [0, 1, 2, 0, 10]),
        ("profile", "at the next training step", [0, 1, 2, 0, 20]),
        ("hold", "ignored: the run does not wait for GPUs", [0, 1, 2, 0, 20]),
        ("dance", "unknown request, ignored", [0, 1, 2, 0, 20]),
        ("stop", "at the next step, with a checkpoint", [1, 1, 2, 0, 20]),
        ("stop", "already requested", [1, 1, 2, 0, 20]),
    ]
    for request, outcome, numbers in outcomes:
        assert (counters.apply(request), counters.to_list()) == (outcome, numbers)
        assert counters.paused == (request == "pause")
    counters.timed_checkpoints = 3
    assert RequestCounters.from_list(counters.to_list()) == counters


@pytest.mark.parametrize("steps", [0, 101, "7", None])
def test_profile_request_with_invalid_steps_is_refused(steps: object, control_folder: Path) -> None:
    text = json.dumps({"format": 1, "request": "profile", "by": "me", "steps": steps})
    (control_folder / "1.json").write_text(text)
    [request] = consume_requests(control_folder)
    counters = RequestCounters()
    assert counters.apply(request.request, request.steps).startswith("refused: ")
    assert counters == RequestCounters()


def test_send_request_writes_documented_fields(control_folder: Path) -> None:
    before = time.time()
    send_request(control_folder, "order", priority=5)
    [path] = control_folder.iterdir()
    values = json.loads(path.read_text())
    assert before - 0.001 <= values.pop("time") <= time.time() + 0.001
    assert values.pop("by").endswith(f"@{socket.gethostname()} (process {os.getpid()})")
    assert values == {"format": 1, "request": "order", "priority": 5}
    [request] = consume_requests(control_folder)
    assert (request.request, request.priority) == ("order", 5)
    assert request.by.endswith(f"(process {os.getpid()})")


def test_send_request_refuses_linked_control_folder(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a")
    (tmp_path / "autostart").mkdir()
    folder.control.symlink_to(tmp_path / "autostart")
    with raises_problem("not-writable", str(folder.control), "stop"):
        send_request(folder.control, "stop")
    assert list((tmp_path / "autostart").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_consume_requests_accepts_request_of_root(control_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send_request(control_folder, "stop")
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
    assert [request.request for request in consume_requests(control_folder)] == ["stop"]


def test_consume_requests_refuses_request_of_another_user(
    control_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_request(control_folder, "stop")
    [path] = control_folder.iterdir()
    owner = change_owner(path, monkeypatch)
    [request] = consume_requests(control_folder)
    assert request == ControlRequest(request="foreign file", by=f"uid {owner}")
    assert list(control_folder.iterdir()) == []
    counters = RequestCounters()
    outcome = counters.apply(request.request)
    assert (counters.stop, outcome) == (False, "refused: the file must belong to the user of the run, or to root")
    event = ControlEvent(request=request.request, by=request.by, outcome=outcome)
    assert event_line(event) == f"foreign file from uid {owner}: {outcome}"


def test_send_request_rejects_user_without_permission(control_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = control_folder.with_name("owner.json")
    owner.write_text("{}")
    monkeypatch.setattr(os, "geteuid", lambda: owner.stat().st_uid + 1)
    with raises_problem("foreign-owner", str(control_folder), "stop", owner.stat().st_uid):
        send_request(control_folder, "stop")
    assert list(control_folder.iterdir()) == []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    send_request(control_folder, "stop")
    assert len(list(control_folder.iterdir())) == 1


def test_consume_requests_refuses_and_removes_invalid_files(control_folder: Path) -> None:
    create_invalid_requests(control_folder)
    paths = [request.request for request in consume_requests(control_folder)]
    assert paths == ["unreadable file"] * 11
    assert set(paths) < set(REFUSAL_OUTCOMES)
    remaining = sorted(path.name for path in control_folder.iterdir())
    assert [name.split(".")[0] for name in remaining] == ["4-folder", "98"]
    assert (control_folder / remaining[0] / "kept").exists()
    assert list(consume_requests(control_folder)) == []
    assert (control_folder.parent.parent / "outside.json").exists()


def test_consume_requests_ignores_request_that_cannot_be_removed(
    control_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_request(control_folder, "pause")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    assert list(consume_requests(control_folder)) == []
    monkeypatch.undo()
    assert [request.request for request in consume_requests(control_folder)] == ["pause"]


def test_consume_requests_ignores_symlinked_control_folder(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    data = tmp_path / "data"
    data.mkdir()
    (data / "labels.json").write_text("{}")
    folder.control.symlink_to(data)
    assert list(consume_requests(folder.control)) == []
    assert (data / "labels.json").exists()
