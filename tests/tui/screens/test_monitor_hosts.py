"""The monitor with other hosts, driven by keys."""

from __future__ import annotations

import dataclasses
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.gpus.snapshot import Measurement
from support.replace import replace
from support.runs.factories import make_row
from support.screen.demo_app import demo_app, toasts, visible_text, wait_until, wait_until_idle
from support.screen.hosts import FrozenHosts, make_reading, make_readings
from support.screen.screen_driver import Drive, drive, press, real_app
from tui.screens import monitor_hosts
from tui.screens.app import GputrainApp
from tui.screens.demo.server import LIVE_RUN
from tui.screens.monitor_hosts import MonitorHosts
from tui.screens.tables import hosts as hosts_table
from tui.screens.tables.hosts import HostGroup, host_lines, hosts_summary
from tui.screens.widgets.lines import Lines

pytestmark = pytest.mark.usefixtures("isolated_folder")
WIDE, SMALL = (160, 48), (80, 24)
TIMEOUT_SECONDS = 20.0


def drive_hosts(root: Path, act: Drive, size: tuple[int, int] = SMALL, hosts: FrozenHosts | None = None) -> None:
    """Drive the monitor of the demo's GPUs with the hosts of `make_readings`."""
    app = demo_app(root, demo=None)
    app.host_watch = hosts or FrozenHosts(make_readings())
    drive(app, act, size)


def squeezed(text: str) -> str:
    """Return a text with one blank between its words."""
    return " ".join(text.split())


def gpus(pilot: Pilot[None]) -> str:
    return visible_text(pilot, "#gpus")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would be called, without the program."""
    calls: list[list[str]] = []

    def call(words: Sequence[str], _: Path) -> str:
        calls.append(list(words))
        return "lab1: Waiting.\nlab1: night: stopped"

    monkeypatch.setattr(monitor_hosts, "call_gputrain", call)
    monkeypatch.setattr(MonitorHosts, "_hand_over", lambda _, program: calls.append(list(program)[-2:]))
    return calls


def test_hosts_are_folded_to_lines_with_sums_and_with_the_reason_and_age_of_a_loss(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shown = squeezed(gpus(pilot))
        assert "▸ lab1 6 x H100 2 free" in shown and "▸ lab2 4 x A100 2 free" in shown
        assert "idle 42 min ana" in shown
        await pilot.resize_terminal(*WIDE)
        await wait_until(pilot, lambda: "6 hosts  18 GPUs  6 free" in visible_text(pilot, "#title"))
        assert "2 down" in visible_text(pilot, "#title")
        await wait_until_idle(pilot)
        shown = squeezed(gpus(pilot))
        assert "lab3 down, last word 12 min ago: Connection refused" in shown
        assert "lab4 enter logs in: Permission denied (publickey,password)." in shown
        assert "lab5" in shown and "NVML: no driver" in shown

    drive_hosts(demo_runs_folder, act)


def test_enter_unfolds_a_host_and_folds_it_again(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "down")
        assert "enter unfold" in visible_text(pilot, "Keys")
        await press(pilot, "enter")
        assert "▾ lab1" in gpus(pilot) and "idle 42 min" in gpus(pilot)
        assert "enter fold" in visible_text(pilot, "Keys")
        await press(pilot, "down")
        assert "enter monitor of lab1" in visible_text(pilot, "Keys")
        await press(pilot, "up", "enter")
        assert "▸ lab1" in gpus(pilot)

    drive_hosts(demo_runs_folder, act)


def test_list_of_runs_says_where_those_of_hosts_are(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        assert "No runs here yet; those of lab1, lab2 are on the monitor" in visible_text(pilot, "#all-runs")

    drive_hosts(tmp_path / "runs", act, WIDE)


def test_laptop_without_a_gpu_is_no_host_of_the_sums() -> None:
    [reading, *_] = make_readings()
    here = dataclasses.replace(reading, snapshot=None)
    groups = [HostGroup(here, is_here=True), HostGroup(reading)]
    assert hosts_summary(groups).startswith("1 host  6 GPUs")
    assert hosts_summary([HostGroup(reading, is_here=True), HostGroup(reading)]).startswith("2 hosts  12 GPUs")


def test_processes_are_those_of_the_host_under_the_cursor(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert "Processes  " in visible_text(pilot, "#processes")
        await press(pilot, "down", "down")
        assert "Processes of lab2  " in visible_text(pilot, "#processes")
        await press(pilot, "tab", "ctrl+k")
        assert "gets no signals from here" in toasts(pilot)[-1]

    drive_hosts(demo_runs_folder, act)


FOUND_HOSTS = {
    "a100": ["lab2"],
    "free memory>70": ["demo", "lab1", "lab2"],
    "carol": ["demo"],
    "lab2": ["lab2"],
    "h100 bob": ["demo", "lab1"],
}


def test_filter_looks_into_folded_hosts(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        await press(pilot, "slash")
        here = screen._hosts.groups[0].name
        for query, hosts in FOUND_HOSTS.items():
            screen.query_one("#filter").value = query
            await pilot.pause()
            found = [group.name for group, _ in screen._hosts.shown(query)]
            assert found == [here if name == "demo" else name for name in hosts], query

    drive_hosts(demo_runs_folder, act)


def test_runs_of_hosts_are_listed_opened_and_stopped_by_commands_whose_answer_is_shown(
    demo_runs_folder: Path, called: list[list[str]]
) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "tab", "tab")
        assert "lab1:night" in visible_text(pilot, "#runs") and "lab2:old" in visible_text(pilot, "#runs")
        pilot.app.screen.query_one("#runs", Lines).select_key("lab1:night")
        await press(pilot, "enter")
        assert called == [["attach", "lab1:night"]]
        await press(pilot, "s")
        assert len(called) == 1, "it asks first"
        await press(pilot, "down", "enter")
        await wait_until(pilot, lambda: "lab1: Waiting.\nlab1: night: stopped" in toasts(pilot))
        assert called[-1] == ["stop", "--no-wait", "lab1:night"]
        pilot.app.screen.query_one("#runs", Lines).select_key("lab2:old")
        await press(pilot, "u")
        await wait_until(pilot, lambda: called[-1] == ["resume", "--detach", "lab2:old"])

    drive_hosts(demo_runs_folder, act)


def test_end_of_the_screen_does_not_wait_for_a_host(demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It does not answer before the test has ended: a screen that waits for it ends only after this time.
    asked, may_answer, answers = threading.Event(), threading.Event(), list[str]()

    def call(*_: object) -> str:
        asked.set()
        may_answer.wait(TIMEOUT_SECONDS)
        answers.append("late")
        return ""

    monkeypatch.setattr(monitor_hosts, "call_gputrain", call)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "tab", "tab")
        pilot.app.screen.query_one("#runs", Lines).select_key("lab2:old")
        await press(pilot, "u")
        await wait_until(pilot, asked.is_set)

    drive_hosts(demo_runs_folder, act)
    assert not answers
    may_answer.set()


def test_run_in_a_shared_folder_is_listed_once(demo_runs_folder: Path) -> None:
    own = demo_runs_folder / "digits-3"

    async def act(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, GputrainApp) and isinstance(app.host_watch, FrozenHosts)
        [row] = [row for row in app.run_list_poller.rows or () if row.folder == str(own)]
        app.host_watch.shown = (make_reading("lab1", 2, row, make_row("lab1:other", "finished", "/runs/other")),)
        await press(pilot, "tab", "tab")
        shown = visible_text(pilot, "#runs")
        assert "lab1:other" in shown and "digits-3" in shown and "lab1:digits-3" not in shown

    drive_hosts(demo_runs_folder, act)


def test_enter_on_a_lost_host_connects_and_on_one_that_asks_hands_over_the_terminal(
    demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[object] = []
    monkeypatch.setattr(MonitorHosts, "_hand_over", lambda _, program: handed.append(program))
    hosts = FrozenHosts(make_readings())

    async def act(pilot: Pilot[None]) -> None:
        panel = pilot.app.screen.query_one("#gpus", Lines)
        panel.select_key("lab3/")
        await press(pilot, "enter")
        assert hosts.retried == ["lab3"] and not handed
        panel.select_key("lab4/")
        await press(pilot, "enter")
        assert hosts.retried == ["lab3"] and len(handed) == 1

    drive_hosts(demo_runs_folder, act, WIDE, hosts)


def test_unchanged_hosts_make_no_lines(demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = FrozenHosts([make_reading(f"lab{number}") for number in range(32)])

    async def act(pilot: Pilot[None]) -> None:
        made: list[int] = []
        monkeypatch.setattr(hosts_table, "host_lines", lambda *arguments: made.append(1) or host_lines(*arguments))  # type: ignore[func-returns-value]
        await press(pilot, "down", "down")
        pilot.app.screen.update_content()  # type: ignore[attr-defined]
        assert not made
        first = hosts.shown[0]
        assert first.snapshot is not None
        hosts.shown = (dataclasses.replace(first, snapshot=replace(first.snapshot, time=1.0)), *hosts.shown[1:])
        pilot.app.screen.update_content()  # type: ignore[attr-defined]
        assert made

    drive_hosts(demo_runs_folder, act, SMALL, hosts)


def test_this_host_among_the_others_is_shown_once(demo_runs_folder: Path) -> None:
    snapshot = make_reading("lab1").snapshot
    assert snapshot is not None
    same = dataclasses.replace(make_reading("alias"), snapshot=replace(snapshot, host="demo-server"))

    async def act(pilot: Pilot[None]) -> None:
        assert "alias" not in gpus(pilot) and "lab1" in gpus(pilot)

    drive_hosts(demo_runs_folder, act, SMALL, FrozenHosts([same, make_reading("lab1")]))


def test_names_and_reasons_of_hosts_are_escaped(demo_runs_folder: Path) -> None:
    reading = make_reading("lab1", 1)
    assert reading.snapshot is not None
    evil = Measurement("\x1b]0;evil\x07", 0.0)
    gpu = replace(reading.snapshot.gpus[0], name=evil)
    processes = tuple(replace(process, user=evil, command=evil) for process in gpu.processes.value or ())
    gpu = replace(gpu, processes=Measurement(processes, 0.0))
    hostile = dataclasses.replace(
        reading,
        reason="\x1b[2J[red]",
        snapshot=replace(reading.snapshot, gpus=(gpu,)),
        rows=(make_row("a\x1b[2Jb", "failed", "/x", message="\x1b[2J"),),
    )

    async def act(pilot: Pilot[None]) -> None:
        pilot.app.screen.query_one("#gpus", Lines).select_key("lab1/")
        await press(pilot, "tab")
        assert "\x1b" not in visible_text(pilot) and "[red]" in gpus(pilot)

    drive_hosts(demo_runs_folder, act, WIDE, FrozenHosts([hostile]))


def test_program_in_the_foreground_has_the_terminal_and_its_failure_stays(
    demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "")
    monkeypatch.setattr(subprocess, "call", lambda *_, **__: 255)

    async def act(pilot: Pilot[None]) -> None:
        suspended: list[str] = []
        pilot.app.app_suspend_signal.subscribe(pilot.app.screen, lambda _: suspended.append("suspended"))
        monkeypatch.setattr(type(pilot.app._driver), "can_suspend", True)
        pilot.app.screen.query_one("#runs", Lines).focus()
        pilot.app.screen.query_one("#runs", Lines).select_key("lab1:night")
        await press(pilot, "enter")
        assert suspended == ["suspended"] and len(asked) == 1

    drive_hosts(demo_runs_folder, act)


@pytest.mark.parametrize("run", [None, LIVE_RUN], ids=["monitor", "run"])
def test_screen_that_another_host_shows_is_left_where_it_began(
    demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch, run: str | None
) -> None:
    left = []

    async def act(pilot: Pilot[None]) -> None:
        app.action_runs()
        await press(pilot, "escape")
        assert not left
        await press(pilot, "escape")
        assert left

    app = real_app(demo_runs_folder, run)
    app.called_host = "lab1"
    monkeypatch.setattr(app, "exit", lambda: left.append(True))
    drive(app, act)
