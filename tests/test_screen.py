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
from cockpit import made_up_app, made_up_runs, settled, text_of, until, without_gpu
from test_journal import epoch, started
from test_runs import make_run
from textual.pilot import Pilot
from textual.widgets import Input

from engine.runs.control import consume_requests
from engine.runs.events import StepEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "GPUTRAIN_RESERVATIONS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "runs"
    owners = made_up_runs(root)
    yield root
    for owner in owners:
        owner.release()


def drive(app: GputrainApp, act: Drive, size: tuple[int, int] = (100, 30)) -> None:
    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            await settled(pilot)
            await act(pilot)

    asyncio.run(main())


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settled(pilot)


def real_app(root: Path, run: str | None = None) -> GputrainApp:
    return made_up_app(root, without_gpu(), demo=None, run=run)


# Monitor


def test_the_first_screen_shows_gpus_processes_and_runs(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shown = text_of(pilot)
        assert "stale, no answer for 4 s" in text_of(pilot, "#gpus")
        assert "jupyter-lab" in text_of(pilot, "#processes")
        assert "fashion-17  epoch 18/30  acc 0.9243  ETA 7m08s" in text_of(pilot, "#runs")
        assert "MADE UP: no such server" in shown
        assert "1 run live   1 Hz" in shown

    drive(made_up_app(runs), act, (120, 34))


def test_picked_gpus_are_those_of_the_form(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "down", "down", "space", "down", "space")
        assert text_of(pilot, "#gpus").count("[x]") == 2
        await press(pilot, "n")
        assert "gputrain run digits --gpus 2,3" in text_of(pilot, "#command")
        assert "2 GPUs, global batch 64" in text_of(pilot, "#plan")

    drive(made_up_app(runs), act)


def test_without_a_gpu_it_shows_the_host_and_says_that_runs_use_the_cpu(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shown = " ".join(text_of(pilot, "#gpus").replace("┃", " ").split())
        assert "training uses the CPU" in shown
        assert "CPU 37%" in shown
        assert "memory 12.0/64.0 GiB" in shown
        assert "no runs yet; n starts one" in text_of(pilot, "#runs")

    drive(real_app(tmp_path / "runs"), act)


def test_a_filter_keeps_what_holds_the_text(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", "b", "o", "b")
        assert "41204" in text_of(pilot, "#processes")
        assert "41206" not in text_of(pilot, "#processes")
        await press(pilot, "escape")
        assert "41206" in text_of(pilot, "#processes")

    drive(made_up_app(runs), act)


def test_a_signal_goes_to_the_process_that_was_shown(tmp_path: Path) -> None:
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


def test_a_run_shows_how_far_it_is_its_curves_and_its_log(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shown = text_of(pilot)
        assert "● training   epoch 19/30   step 278/469" in shown
        assert "ETA 7m08s" in shown
        assert "train 0." in text_of(pilot, "#loss")
        assert "val 0.9" in text_of(pilot, "#accuracy")
        assert "rank 1  GPU-1de01de0  busy" in text_of(pilot, "#devices")
        assert "epoch  18  train loss" in text_of(pilot, "#log")

    drive(made_up_app(runs, run=LIVE_RUN), act, (120, 34))


@pytest.mark.parametrize(("key", "request_name"), [("c", "checkpoint"), ("p", "pause")])
def test_requests_go_through_the_runs_folder(runs: Path, key: str, request_name: str) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, key)

    drive(made_up_app(runs, run=LIVE_RUN), act)
    assert [one.request for one in consume_requests(RunFolder(runs / LIVE_RUN).control)] == [request_name]


def test_a_stop_is_asked_about_first(runs: Path) -> None:
    control = RunFolder(runs / LIVE_RUN).control

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "s", "enter")
        assert not list(consume_requests(control))
        await press(pilot, "s", "down", "enter")

    drive(made_up_app(runs, run=LIVE_RUN), act)
    assert [one.request for one in consume_requests(control)] == ["stop"]


def test_nothing_is_asked_of_a_run_that_is_over(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "p", "s", "c")
        assert not list(consume_requests(RunFolder(runs / FINISHED_RUN).control))

    drive(made_up_app(runs, run=FINISHED_RUN), act)


def test_resume_before_the_first_poll_says_that_the_run_is_not_read_yet(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app: Any = pilot.app
        app.resume_run(RunFolder(runs / FINISHED_RUN), None)
        await pilot.pause()
        assert [one.message for one in app._notifications] == [f"{FINISHED_RUN} is not read yet"]

    drive(made_up_app(runs), act)


def test_leaving_asks_for_nothing(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, MonitorScreen)
        await pilot.press("q")

    drive(made_up_app(runs, run=LIVE_RUN), act)
    assert not list(consume_requests(RunFolder(runs / LIVE_RUN).control))


def test_a_chart_is_exported_as_a_drawing_and_a_table(runs: Path, tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "m", "e", "tab", "e", "e")

    drive(made_up_app(runs, run=FINISHED_RUN), act)
    names = ["accuracy-2.csv", "accuracy-2.svg", "accuracy.csv", "accuracy.svg", "loss.csv", "loss.svg"]
    assert sorted(path.name for path in tmp_path.glob("*-3-*")) == [f"{FINISHED_RUN}-{name}" for name in names]
    rows = (tmp_path / f"{FINISHED_RUN}-loss.csv").read_text().splitlines()
    assert rows[0] == "curve,epoch,value"
    assert sum(row.startswith("train,") for row in rows) == 600
    drawing = (tmp_path / f"{FINISHED_RUN}-loss.svg").read_text()
    assert drawing.startswith("<svg") and drawing.count("<polyline") == 2 and ">val</text>" in drawing


def test_the_axis_the_scale_and_the_cursor_are_named(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "x", "g", "m", "left")
        assert "step 600  log  smooth 2%" in text_of(pilot, "#loss")
        await press(pilot, "left", "left")
        assert "step 588" in text_of(pilot, "#accuracy")

    drive(made_up_app(runs, run=FINISHED_RUN), act)


def test_a_strange_journal_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    def step(last: int, losses: list[float]) -> StepEvent:
        return StepEvent(step=last, epoch=1, losses=losses, lr=0.0, images_per_second=0.0, data_wait=0.0)

    nan, inf = float("nan"), float("inf")
    folder = make_run(tmp_path / "runs", "odd-[red]", started(), step(3, [nan, inf, 1e300]), step(2**40, [1.0]))
    with folder.journal.open("a") as file:
        file.write('{"type": "step"}\n\x00\xff\n{"type": "epoch", "epoch": null}\n' + to_line(step(4, [0.0]))[:-9])
    folder.log.write_text("\x1b[31mred\x1b[0m [bold]not bold[/]\n")

    async def act(pilot: Pilot[None]) -> None:
        assert "3 not finite" not in text_of(pilot) and "2 not finite" in text_of(pilot, "#loss")
        assert "\\x1b[31mred\\x1b[0m [bold]not bold[/]" in text_of(pilot, "#log")
        assert "odd-[red]" in text_of(pilot)
        assert "crashed" in text_of(pilot)
        await press(pilot, "x", "x", "g", "m", "f", "plus", "plus", "minus", "left", "comma", "0", "d", "escape", "l")
        assert pilot.app.is_running

    drive(real_app(tmp_path / "runs", run="odd-[red]"), act)


def test_a_folder_that_is_deleted_while_it_is_open_is_said_to_be(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shutil.rmtree(runs / FINISHED_RUN)
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen._poller.latest.folder_missing)
        await settled(pilot)
        assert "the folder of this run is gone" in text_of(pilot)
        assert "rank 1" in text_of(pilot, "#devices")
        assert "train 0." in text_of(pilot, "#loss")
        await press(pilot, "d", "s", "e")

    drive(made_up_app(runs, run=FINISHED_RUN), act)


def test_what_comes_is_drawn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs", "a", started(), epoch(1, 0.5))

    async def act(pilot: Pilot[None]) -> None:
        assert "val 0.5" in text_of(pilot, "#accuracy")
        with folder.journal.open("a") as file:
            file.write(to_line(epoch(2, 0.75)) + "\n")
        await until(pilot, lambda: "val 0.75" in text_of(pilot, "#accuracy"))

    drive(real_app(tmp_path / "runs", run="a"), act)


# Runs


def test_runs_are_filtered_opened_and_started_again_with_changes(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "slash", *"digits")
        assert text_of(pilot, "#all-runs").count("-3") == 1
        assert LIVE_RUN not in text_of(pilot, "#all-runs")
        await press(pilot, "enter")
        pilot.app.screen.query_one(Lines).focus()
        await press(pilot, "a")
        assert isinstance(pilot.app.screen, FormScreen)
        assert f"{FINISHED_RUN.replace('-3', '-4')}" in text_of(pilot, "#command").replace("\n", "")
        await press(pilot, "escape", "enter")
        assert isinstance(pilot.app.screen, RunScreen)
        assert pilot.app.screen.folder.name == FINISHED_RUN

    drive(made_up_app(runs), act)


# Form


async def type_into(pilot: Pilot[None], key: str, text: str) -> None:
    screen: Any = pilot.app.screen
    field = screen.query_one(f"#field-{key.replace('.', '-')}")
    field.control.focus()
    await pilot.pause()
    field.control.value = ""
    await pilot.press(*text)
    await settled(pilot)


def test_a_wrong_value_is_marked_as_it_is_typed_and_start_is_refused_with_the_list(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "0")
        assert "✗ 0 is not allowed: must be greater than or equal to 1" in text_of(pilot)
        await type_into(pilot, "data.batch_size", "x")
        await press(pilot, "ctrl+s")
        shown = text_of(pilot)
        assert "not started: 2 things to mend" in shown
        assert "run.epochs" in shown and "data.batch_size" in shown
        await press(pilot, "escape")
        await type_into(pilot, "run.epochs", "3")
        await type_into(pilot, "data.batch_size", "16")
        assert "ready to start" in text_of(pilot)
        assert "44 steps an epoch, 132 in 3 epochs" in text_of(pilot, "#plan")
        assert "gputrain run digits --epochs 3 --batch-size 16" in text_of(pilot, "#command")

    drive(real_app(tmp_path / "runs"), act, (140, 40))


def test_an_optimizer_and_a_scheduler_bring_their_own_fields(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert "optim.momentum" in text_of(pilot) and "optim.betas" not in text_of(pilot)
        screen: Any = pilot.app.screen
        screen.query_one("#field-optim-name").control.value = "adamw"
        screen.query_one("#field-schedule-name").control.value = "step"
        await settled(pilot)
        shown = text_of(pilot)
        assert "optim.betas" in shown and "optim.momentum" not in shown
        assert "schedule.step_size" in shown and "schedule.final_lr_ratio" not in shown

    drive(real_app(tmp_path / "runs"), act, (140, 48))


def test_what_is_none_of_the_choices_is_typed(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        screen: Any = pilot.app.screen
        screen.query_one("#field-optim-name").control.value = "other …"
        await settled(pilot)
        assert "one of torch's" in text_of(pilot, ".dialog")
        await press(pilot, "escape")
        assert "optim.name" not in screen.form.overrides
        screen.query_one("#field-data-dataset").control.value = "other …"
        await settled(pilot)
        await press(pilot, *"m:d", "enter")
        assert screen.form.overrides["data.dataset"] == "m:d"
        assert screen.query_one("#field-data-dataset").control.value == "m:d"

    drive(real_app(tmp_path / "runs"), act, (140, 48))


def test_a_search_finds_every_key_by_name_and_by_what_it_is_for(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        pilot.app.screen.query_one("#preset").focus()
        await press(pilot, "slash", *"cudnn")
        assert "device.cudnn_benchmark" in text_of(pilot)
        assert "run.epochs" not in text_of(pilot, "#fields")

    drive(real_app(tmp_path / "runs"), act)


def test_a_demonstration_starts_nothing(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "ctrl+s")
        assert isinstance(pilot.app.screen, FormScreen)

    drive(made_up_app(runs), act)


# Everywhere

TABLES: dict[type[Any], tuple[Command, ...]] = {
    MonitorScreen: keymap.MONITOR_COMMANDS,
    RunScreen: keymap.RUN_COMMANDS,
    RunsScreen: keymap.RUNS_COMMANDS,
    FormScreen: keymap.FORM_COMMANDS,
    StartingScreen: keymap.STARTING_COMMANDS,
}


@pytest.mark.parametrize("screen", TABLES, ids=lambda screen: screen.__name__)
def test_every_command_of_the_table_is_one_of_its_screen(screen: type[Any]) -> None:
    for command in (*TABLES[screen], *keymap.GLOBAL_COMMANDS):
        name = command.action.partition("(")[0]
        owner = GputrainApp if name.startswith("app.") else screen
        assert hasattr(owner, f"action_{name.removeprefix('app.')}"), command
    keys = [key for command in screen.COMMAND_TABLE for key in command.keys]
    assert len(keys) == len(set(keys))


def test_footer_help_and_palette_are_made_of_the_table(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        for command in keymap.MONITOR_COMMANDS:
            assert (f"{command.key_label} {command.title}" in text_of(pilot, "Keys")) is (command.priority > 0)
        provider = CommandProvider(pilot.app.screen, None)
        offered = [str(hit.display) async for hit in provider.discover()]  # type: ignore[union-attr]
        await press(pilot, "question_mark")
        for command in (*keymap.MONITOR_COMMANDS, *keymap.GLOBAL_COMMANDS):
            assert command.help in text_of(pilot)
            assert any(command.title in text for text in offered)

    drive(made_up_app(runs), act, (140, 34))


def test_a_click_on_a_key_does_what_the_key_does(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        column = text_of(pilot, "Keys").index("runs")
        await pilot.click(Keys, offset=(column, 0))
        await settled(pilot)
        assert isinstance(pilot.app.screen, RunsScreen)
        await pilot.click("#all-runs", offset=(4, 3))
        await pilot.click("#all-runs", offset=(4, 3), times=2)
        await settled(pilot)
        assert isinstance(pilot.app.screen, RunScreen)

    drive(made_up_app(runs), act)


def test_a_terminal_that_is_too_small_is_told_so(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert "too small: gputrain needs 60 columns and 15 lines" in " ".join(text_of(pilot).split())
        await pilot.resize_terminal(60, 15)
        await settled(pilot)
        assert "too small" not in text_of(pilot)
        assert "GPUs" in text_of(pilot)

    drive(made_up_app(runs), act, (59, 24))


def test_without_colours_none_is_sent(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def act(pilot: Pilot[None]) -> None:
        for strip in pilot.app.screen._compositor.render_strips():
            for segment in strip:
                for colour in (segment.style.color, segment.style.bgcolor) if segment.style else ():
                    assert colour is None or colour.is_default

    drive(made_up_app(runs), act)


def test_nothing_that_waits_to_be_typed_blinks(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert not any(one.cursor_blink for one in pilot.app.screen.query(Input))

    drive(made_up_app(runs), act)


def test_the_demonstration_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tui.cli.open_tui import demo_app
    from tui.demo.server import DemoServer
    from tui.pollers import RefreshIntervals

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with DemoServer() as server:

        async def act(pilot: Pilot[None]) -> None:
            await press(pilot, "tab", "tab", "enter", "p")
            await until(pilot, lambda: "paused" in text_of(pilot, "#progress"))
            assert "MADE UP" in text_of(pilot)

        drive(demo_app(server, RefreshIntervals()), act)
        assert list(tmp_path.glob("gputrain-demo-*"))
    assert not list(tmp_path.glob("gputrain-demo-*"))


def test_json_of_runs_tells_what_the_screen_shows(runs: Path) -> None:
    from engine.runs.watcher import RunWatcher
    from tui.text.runs import make_run_row

    row = json.loads(json.dumps(make_run_row(RunWatcher(RunFolder(runs / LIVE_RUN))).to_dict()))
    assert (row["state"], row["step"], row["steps"], row["epochs"]) == ("running", 8720, 14070, 30)
