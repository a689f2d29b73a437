"""The dialogs: log, config, help, and text input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from support.screen.demo_app import demo_app, visible_text, wait_until
from support.screen.screen_driver import drive, press
from tui.screens.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.dialogs import HelpDialog, LogDialog, TextDialog, confirm
from tui.screens.run import RunScreen
from tui.screens.widgets.text_line import TextLine

pytestmark = pytest.mark.usefixtures("isolated_folder")
SIZE = (100, 24)


def log_app(root: Path, read: Callable[[], list[str]], act: Callable[[Pilot[None]], object]) -> None:
    """Open the log dialog on the lines that `read` returns."""

    async def open_log(pilot: Pilot[None]) -> None:
        pilot.app.push_screen(LogDialog("a-run", read))
        await pilot.pause()
        await pilot.pause()
        await act(pilot)  # type: ignore[misc]

    drive(demo_app(root), open_log, SIZE)


def test_log_dialog_stays_in_place_when_scrolled_up(tmp_path: Path) -> None:
    log = [f"line {number}" for number in range(200)]

    async def act(pilot: Pilot[None]) -> None:
        await wait_until(pilot, lambda: "line 199" in visible_text(pilot, "Lines"))
        await pilot.press("ctrl+u", "k")
        shown, dialog = visible_text(pilot, "Lines"), pilot.app.screen
        log.append("a new line")
        del log[:50]
        dialog._follow()  # type: ignore[attr-defined]
        await pilot.pause()
        assert visible_text(pilot, "Lines").split()[:6] == shown.split()[:6]
        await pilot.press("G")
        await wait_until(pilot, lambda: "a new line" in visible_text(pilot, "Lines"))
        await pilot.press("g")
        assert "line 50" in visible_text(pilot, "Lines")

    log_app(tmp_path, lambda: log, act)


def test_run_is_read_below_dialog_and_drawn_when_it_closes(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        run = pilot.app.screen
        assert isinstance(run, RunScreen)
        await press(pilot, "question_mark")
        shown = run.query_one("#progress", TextLine).text.plain
        steps = int(run.chart_data.last_x("step"))
        journal = RunFolder(demo_runs_folder / LIVE_RUN).journal
        step = next(line for line in reversed(journal.read_text().splitlines()) if '"type":"step"' in line)
        with journal.open("a") as file:
            file.write(step.replace(f'"step":{steps}', f'"step":{steps + 10}') + "\n")
        await wait_until(pilot, lambda: run.chart_data.last_x("step") == steps + 10)
        assert isinstance(pilot.app.screen, HelpDialog)
        assert run.query_one("#progress", TextLine).text.plain == shown
        await press(pilot, "escape")
        await wait_until(pilot, lambda: run.query_one("#progress", TextLine).text.plain != shown)

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act, SIZE)


def test_config_dialog_marks_changed_keys(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "d")
        await wait_until(pilot, lambda: "• epochs" in visible_text(pilot))
        assert "default 10" in visible_text(pilot)
        assert "  seed" in visible_text(pilot)
        copied: list[str] = []
        pilot.app.copy_to_clipboard = copied.append  # type: ignore[assignment]
        await press(pilot, "G", "ctrl+y")
        assert copied == [RunFolder(demo_runs_folder / FINISHED_RUN).config.read_text()]
        await press(pilot, "enter")
        assert not isinstance(pilot.app.screen, TextDialog)

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, SIZE)


def test_question_selects_safe_answer_and_shows_its_consequence_whole(demo_runs_folder: Path) -> None:
    consequence = "It leaves the queue and does not start until somebody queues it again."

    async def act(pilot: Pilot[None]) -> None:
        done: list[str] = []
        for keys in (("enter",), ("escape",), ("down", "enter")):
            confirm(pilot.app, "Stop?", "Keep it", "Stop", lambda: done.append("stopped"))
            await press(pilot, *keys)
            assert done == (["stopped"] if "down" in keys else [])
        confirm(pilot.app, f"Cancel a-run? {consequence}", "Keep it", "Cancel it", lambda: None)
        await pilot.pause()
        assert " ".join(visible_text(pilot, ".note").split()) == consequence

    drive(demo_app(demo_runs_folder), act)
