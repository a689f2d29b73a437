"""The screen, driven by its keys, over a made-up server and made-up runs."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from demo_app import demo_app, demo_runs, no_gpu_feed, visible_text, wait_until, wait_until_idle
from engine.runs.control import consume_requests
from engine.runs.events import StepEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from factories import make_epoch, make_run_folder, make_run_started
from tui import keymap
from tui.app import GputrainApp
from tui.demo.server import FINISHED_RUN, LIVE_RUN
from tui.keymap import Command, CommandProvider
from tui.screens.form import FormScreen
from tui.screens.monitor import MonitorScreen
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.screens.starting import StartingScreen
from tui.widgets.keys import Keys
from tui.widgets.lines import Lines

Drive = Callable[[Pilot[None]], Awaitable[None]]


@pytest.fixture(autouse=True)
def isolated_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "GPUTRAIN_RESERVATIONS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))


@pytest.fixture
def demo_runs_folder(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "runs"
    owners = demo_runs(root)
    yield root
    for owner in owners:
        owner.release()


def drive(app: GputrainApp, act: Drive, size: tuple[int, int] = (100, 30)) -> None:
    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            await wait_until_idle(pilot)
            await act(pilot)

    asyncio.run(main())


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await wait_until_idle(pilot)


def real_app(root: Path, run: str | None = None) -> GputrainApp:
    return demo_app(root, no_gpu_feed(), demo=None, run=run)


# Monitor


def test_monitor_screen_shows_gpus_processes_and_runs(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shown = visible_text(pilot)
        assert "stale, no answer for 4 s" in visible_text(pilot, "#gpus")
        assert "jupyter-lab" in visible_text(pilot, "#processes")
        assert "fashion-17  epoch 18/30  acc 0.9243  ETA 7m08s" in visible_text(pilot, "#runs")
        assert "MADE UP: no such server" in shown
        assert "1 run live   1 Hz" in shown

    drive(demo_app(demo_runs_folder), act, (120, 34))


def test_monitor_screen_selected_gpus_fill_form(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "down", "down", "space", "down", "space")
        assert visible_text(pilot, "#gpus").count("[x]") == 2
        await press(pilot, "n")
        assert "gputrain run digits --gpus 2,3" in visible_text(pilot, "#command")
        assert "2 GPUs, global batch 64" in visible_text(pilot, "#plan")

    drive(demo_app(demo_runs_folder), act)


def test_monitor_screen_without_gpu_shows_host_and_cpu_note(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shown = " ".join(visible_text(pilot, "#gpus").replace("┃", " ").split())
        assert "training uses the CPU" in shown
        assert "CPU 37%" in shown
        assert "memory 12.0/64.0 GiB" in shown
        assert "no runs yet; n starts one" in visible_text(pilot, "#runs")

    drive(real_app(tmp_path / "runs"), act)


def test_monitor_screen_filter_keeps_matching_processes(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", "b", "o", "b")
        assert "41204" in visible_text(pilot, "#processes")
        assert "41206" not in visible_text(pilot, "#processes")
        await press(pilot, "escape")
        assert "41206" in visible_text(pilot, "#processes")

    drive(demo_app(demo_runs_folder), act)


def test_monitor_screen_signals_only_process_that_was_shown(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as victim:

        async def act(pilot: Pilot[None]) -> None:
            screen: Any = pilot.app.screen
            from tui.screens.monitor import _process_start_time

            screen._send_signal(victim.pid, None, 15)
            assert victim.poll() is None
            screen._send_signal(victim.pid, _process_start_time(victim.pid), 15)

        drive(real_app(tmp_path / "runs"), act)
        assert victim.wait(5) == -15


# Run


def test_run_screen_shows_progress_curves_and_log(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shown = visible_text(pilot)
        assert "● training   epoch 19/30   step 278/469" in shown
        assert "ETA 7m08s" in shown
        assert "train 0." in visible_text(pilot, "#loss")
        assert "val 0.9" in visible_text(pilot, "#accuracy")
        assert "rank 1  GPU-1de01de0  busy" in visible_text(pilot, "#devices")
        assert "epoch  18  train loss" in visible_text(pilot, "#log")

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act, (120, 34))


@pytest.mark.parametrize(("key", "request_name"), [("c", "checkpoint"), ("p", "pause")])
def test_run_screen_writes_control_request(demo_runs_folder: Path, key: str, request_name: str) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, key)

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)
    assert [one.request for one in consume_requests(RunFolder(demo_runs_folder / LIVE_RUN).control)] == [request_name]


def test_run_screen_confirms_stop(demo_runs_folder: Path) -> None:
    control = RunFolder(demo_runs_folder / LIVE_RUN).control

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "s", "enter")
        assert not list(consume_requests(control))
        await press(pilot, "s", "down", "enter")

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)
    assert [one.request for one in consume_requests(control)] == ["stop"]


def test_run_screen_sends_no_request_to_finished_run(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "p", "s", "c")
        assert not list(consume_requests(RunFolder(demo_runs_folder / FINISHED_RUN).control))

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_resume_before_the_first_poll_says_that_the_run_is_not_read_yet(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app: Any = pilot.app
        app.resume_run(RunFolder(demo_runs_folder / FINISHED_RUN), None)
        await pilot.pause()
        assert [one.message for one in app._notifications] == [f"{FINISHED_RUN} is not read yet"]

    drive(demo_app(demo_runs_folder), act)


def test_run_screen_leaving_sends_no_request(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, MonitorScreen)
        await pilot.press("q")

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)
    assert not list(consume_requests(RunFolder(demo_runs_folder / LIVE_RUN).control))


def test_run_screen_exports_chart_as_svg_and_csv(demo_runs_folder: Path, tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "m", "e", "tab", "e", "e")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)
    names = ["accuracy-2.csv", "accuracy-2.svg", "accuracy.csv", "accuracy.svg", "loss.csv", "loss.svg"]
    assert sorted(path.name for path in tmp_path.glob("*-3-*")) == [f"{FINISHED_RUN}-{name}" for name in names]
    rows = (tmp_path / f"{FINISHED_RUN}-loss.csv").read_text().splitlines()
    assert rows[0] == "curve,epoch,value"
    assert sum(row.startswith("train,") for row in rows) == 600
    drawing = (tmp_path / f"{FINISHED_RUN}-loss.svg").read_text()
    assert drawing.startswith("<svg") and drawing.count("<polyline") == 2 and ">val</text>" in drawing


def test_run_screen_names_axis_scale_and_cursor(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "x", "g", "m", "left")
        assert "step 600  log  smooth 2%" in visible_text(pilot, "#loss")
        await press(pilot, "left", "left")
        assert "step 588" in visible_text(pilot, "#accuracy")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_run_screen_shows_malformed_journal(tmp_path: Path) -> None:
    def step(last: int, losses: list[float]) -> StepEvent:
        return StepEvent(step=last, epoch=1, losses=losses, lr=0.0, images_per_second=0.0, data_wait=0.0)

    nan, inf = float("nan"), float("inf")
    folder = make_run_folder(
        tmp_path / "runs", "odd-[red]", make_run_started(), step(3, [nan, inf, 1e300]), step(2**40, [1.0])
    )
    with folder.journal.open("a") as file:
        file.write('{"type": "step"}\n\x00\xff\n{"type": "epoch", "epoch": null}\n' + to_line(step(4, [0.0]))[:-9])
    folder.log.write_text("\x1b[31mred\x1b[0m [bold]not bold[/]\n")

    async def act(pilot: Pilot[None]) -> None:
        assert "3 not finite" not in visible_text(pilot) and "2 not finite" in visible_text(pilot, "#loss")
        assert "\\x1b[31mred\\x1b[0m [bold]not bold[/]" in visible_text(pilot, "#log")
        assert "odd-[red]" in visible_text(pilot)
        assert "crashed" in visible_text(pilot)
        await press(pilot, "x", "x", "g", "m", "f", "plus", "plus", "minus", "left", "comma", "0", "d", "escape", "l")
        assert pilot.app.is_running

    drive(real_app(tmp_path / "runs", run="odd-[red]"), act)


def test_run_screen_reports_deleted_run_folder(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shutil.rmtree(demo_runs_folder / FINISHED_RUN)
        screen: Any = pilot.app.screen
        await wait_until(pilot, lambda: screen._poller.latest.folder_missing)
        await wait_until_idle(pilot)
        assert "the folder of this run is gone" in visible_text(pilot)
        assert "rank 1" in visible_text(pilot, "#devices")
        assert "train 0." in visible_text(pilot, "#loss")
        await press(pilot, "d", "s", "e")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_run_screen_draws_new_events(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs", "a", make_run_started(), make_epoch(1, 0.5))

    async def act(pilot: Pilot[None]) -> None:
        assert "val 0.5" in visible_text(pilot, "#accuracy")
        with folder.journal.open("a") as file:
            file.write(to_line(make_epoch(2, 0.75)) + "\n")
        await wait_until(pilot, lambda: "val 0.75" in visible_text(pilot, "#accuracy"))

    drive(real_app(tmp_path / "runs", run="a"), act)


# Runs


def test_runs_screen_filters_opens_and_restarts_runs(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "slash", *"digits")
        assert visible_text(pilot, "#all-runs").count("-3") == 1
        assert LIVE_RUN not in visible_text(pilot, "#all-runs")
        await press(pilot, "enter")
        pilot.app.screen.query_one(Lines).focus()
        await press(pilot, "a")
        assert isinstance(pilot.app.screen, FormScreen)
        assert f"{FINISHED_RUN.replace('-3', '-4')}" in visible_text(pilot, "#command").replace("\n", "")
        await press(pilot, "escape", "enter")
        assert isinstance(pilot.app.screen, RunScreen)
        assert pilot.app.screen.folder.name == FINISHED_RUN

    drive(demo_app(demo_runs_folder), act)


# Form


async def type_into(pilot: Pilot[None], key: str, text: str) -> None:
    screen: Any = pilot.app.screen
    field = screen.query_one(f"#field-{key.replace('.', '-')}")
    field.control.focus()
    await pilot.pause()
    field.control.value = ""
    await pilot.press(*text)
    await wait_until_idle(pilot)


def test_form_screen_marks_invalid_values_and_refuses_start(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "0")
        assert "✗ 0 is not allowed: must be greater than or equal to 1" in visible_text(pilot)
        await type_into(pilot, "data.batch_size", "x")
        await press(pilot, "ctrl+s")
        shown = visible_text(pilot)
        assert "not started: 2 things to mend" in shown
        assert "run.epochs" in shown and "data.batch_size" in shown
        await press(pilot, "escape")
        await type_into(pilot, "run.epochs", "3")
        await type_into(pilot, "data.batch_size", "16")
        assert "ready to start" in visible_text(pilot)
        assert "44 steps an epoch, 132 in 3 epochs" in visible_text(pilot, "#plan")
        assert "gputrain run digits --epochs 3 --batch-size 16" in visible_text(pilot, "#command")

    drive(real_app(tmp_path / "runs"), act, (140, 40))


def test_form_screen_shows_fields_of_chosen_optimizer_and_schedule(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert "optim.momentum" in visible_text(pilot) and "optim.betas" not in visible_text(pilot)
        screen: Any = pilot.app.screen
        screen.query_one("#field-optim-name").control.value = "adamw"
        screen.query_one("#field-schedule-name").control.value = "step"
        await wait_until_idle(pilot)
        shown = visible_text(pilot)
        assert "optim.betas" in shown and "optim.momentum" not in shown
        assert "schedule.step_size" in shown and "schedule.final_lr_ratio" not in shown

    drive(real_app(tmp_path / "runs"), act, (140, 48))


def test_form_screen_accepts_typed_value_outside_choices(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        screen: Any = pilot.app.screen
        screen.query_one("#field-optim-name").control.value = "other …"
        await wait_until_idle(pilot)
        assert "one of torch's" in visible_text(pilot, ".dialog")
        await press(pilot, "escape")
        assert "optim.name" not in screen.form.overrides
        screen.query_one("#field-data-dataset").control.value = "other …"
        await wait_until_idle(pilot)
        await press(pilot, *"m:d", "enter")
        assert screen.form.overrides["data.dataset"] == "m:d"
        assert screen.query_one("#field-data-dataset").control.value == "m:d"

    drive(real_app(tmp_path / "runs"), act, (140, 48))


def test_form_screen_search_finds_keys_by_description(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        pilot.app.screen.query_one("#preset").focus()
        await press(pilot, "slash", *"cudnn")
        assert "device.cudnn_benchmark" in visible_text(pilot)
        assert "run.epochs" not in visible_text(pilot, "#fields")

    drive(real_app(tmp_path / "runs"), act)


def test_form_screen_in_demo_starts_nothing(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "ctrl+s")
        assert isinstance(pilot.app.screen, FormScreen)

    drive(demo_app(demo_runs_folder), act)


# Everywhere

TABLES: dict[type[Any], tuple[Command, ...]] = {
    MonitorScreen: keymap.MONITOR_COMMANDS,
    RunScreen: keymap.RUN_COMMANDS,
    RunsScreen: keymap.RUNS_COMMANDS,
    FormScreen: keymap.FORM_COMMANDS,
    StartingScreen: keymap.STARTING_COMMANDS,
}


@pytest.mark.parametrize("screen", TABLES, ids=lambda screen: screen.__name__)
def test_screen_implements_every_command_of_its_table(screen: type[Any]) -> None:
    for command in (*TABLES[screen], *keymap.GLOBAL_COMMANDS):
        name = command.action.partition("(")[0]
        owner = GputrainApp if name.startswith("app.") else screen
        assert hasattr(owner, f"action_{name.removeprefix('app.')}"), command
    keys = [key for command in screen.COMMAND_TABLE for key in command.keys]
    assert len(keys) == len(set(keys))


def test_footer_help_and_palette_follow_command_table(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        for command in keymap.MONITOR_COMMANDS:
            assert (f"{command.key_label} {command.title}" in visible_text(pilot, "Keys")) is (command.priority > 0)
        provider = CommandProvider(pilot.app.screen, None)
        offered = [str(hit.display) async for hit in provider.discover()]  # type: ignore[union-attr]
        await press(pilot, "question_mark")
        for command in (*keymap.MONITOR_COMMANDS, *keymap.GLOBAL_COMMANDS):
            assert command.help in visible_text(pilot)
            assert any(command.title in text for text in offered)

    drive(demo_app(demo_runs_folder), act, (140, 34))


def test_footer_key_click_acts_like_key_press(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        column = visible_text(pilot, "Keys").index("runs")
        await pilot.click(Keys, offset=(column, 0))
        await wait_until_idle(pilot)
        assert isinstance(pilot.app.screen, RunsScreen)
        await pilot.click("#all-runs", offset=(4, 3))
        await pilot.click("#all-runs", offset=(4, 3), times=2)
        await wait_until_idle(pilot)
        assert isinstance(pilot.app.screen, RunScreen)

    drive(demo_app(demo_runs_folder), act)


def test_app_reports_too_small_terminal(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert "too small: gputrain needs 60 columns and 15 lines" in " ".join(visible_text(pilot).split())
        await pilot.resize_terminal(60, 15)
        await wait_until_idle(pilot)
        assert "too small" not in visible_text(pilot)
        assert "GPUs" in visible_text(pilot)

    drive(demo_app(demo_runs_folder), act, (59, 24))


def test_app_with_no_color_sends_no_colors(demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def act(pilot: Pilot[None]) -> None:
        for strip in pilot.app.screen._compositor.render_strips():
            for segment in strip:
                for colour in (segment.style.color, segment.style.bgcolor) if segment.style else ():
                    assert colour is None or colour.is_default

    drive(demo_app(demo_runs_folder), act)


def test_app_inputs_do_not_blink(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert not any(one.cursor_blink for one in pilot.app.screen.query(Input))

    drive(demo_app(demo_runs_folder), act)


def test_demo_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tui.cli.open_tui import demo_app
    from tui.demo.server import DemoServer
    from tui.pollers import RefreshIntervals

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with DemoServer() as server:

        async def act(pilot: Pilot[None]) -> None:
            await press(pilot, "tab", "tab", "enter", "p")
            await wait_until(pilot, lambda: "paused" in visible_text(pilot, "#progress"))
            assert "MADE UP" in visible_text(pilot)

        drive(demo_app(server, RefreshIntervals()), act)
        assert list(tmp_path.glob("gputrain-demo-*"))
    assert not list(tmp_path.glob("gputrain-demo-*"))


def test_runs_json_matches_screen(demo_runs_folder: Path) -> None:
    from engine.runs.watcher import RunWatcher
    from tui.text.runs import make_run_row

    row = json.loads(json.dumps(make_run_row(RunWatcher(RunFolder(demo_runs_folder / LIVE_RUN))).to_dict()))
    assert (row["state"], row["step"], row["steps"], row["epochs"]) == ("running", 8720, 14070, 30)
