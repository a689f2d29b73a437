"""The list of runs with its preview, driven by keys and the mouse."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from engine.runs.journal import JournalReader
from support.replace import replace
from support.runs.factories import append_events
from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, real_app
from tui.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.form import FormScreen
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.widgets.lines import Lines
from tui.widgets.preview import Preview

pytestmark = pytest.mark.usefixtures("isolated_folder")
WIDE = (160, 48)


@pytest.fixture
def many_runs(demo_runs_folder: Path) -> Path:
    """A folder with 40 finished runs besides the demo's."""
    for number in range(40):
        shutil.copytree(demo_runs_folder / FINISHED_RUN, demo_runs_folder / f"copy-{number:02d}")
    return demo_runs_folder


def selected(pilot: Pilot[None]) -> str:
    key = pilot.app.screen.query_one("#all-runs", Lines).selected_key
    return Path(key or "").name


def test_runs_screen_preview_follows_cursor(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        assert "fashion-17" in visible_text(pilot, "#run-preview")
        await press(pilot, "j", "j")
        preview = visible_text(pilot, "#run-preview")
        assert "rank 1 on GPU-1: CUDA out of memory" in preview
        assert "model.name  " in preview
        assert "accuracy" in preview
        await press(pilot, "k")
        assert f"─ {FINISHED_RUN} " in visible_text(pilot, "#run-preview")

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_runs_screen_preview_has_the_age_of_the_list(demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes, and the run does not change."""

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j")
        screen = pilot.app.screen
        assert isinstance(screen, RunsScreen)
        for seconds, age in ((15.0, "15 s ago"), (120.0, "2 min ago")):
            monkeypatch.setattr("engine.runs.run_row.age_of", lambda _, seconds=seconds: seconds)
            screen.update_content()
            await wait_until_idle(pilot)
            assert age in visible_text(pilot, "#all-runs") and age in visible_text(pilot, "#run-preview")

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_runs_screen_preview_shows_last_run_of_burst(many_runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        read: list[str] = []
        previews = pilot.app.screen.query_one(Preview)._previews
        request = previews.request
        previews.request = lambda folder: (read.append(Path(folder or "").name), request(folder))[1]  # type: ignore
        for _ in range(20):
            await pilot.press("j")
        await pilot.press("G")
        await wait_until_idle(pilot)
        assert read[-1] == selected(pilot)
        assert f"─ {selected(pilot)} " in visible_text(pilot, "#run-preview")
        assert "best val acc" in visible_text(pilot, "#run-preview")
        await press(pilot, "g")
        assert f"─ {selected(pilot)} " in visible_text(pilot, "#run-preview")

    drive(demo_app(many_runs), act, WIDE)


def test_runs_screen_preview_follows_journal(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        run = RunFolder(demo_runs_folder / LIVE_RUN)
        last = next(event for event in reversed(list(JournalReader(run.journal).poll())) if event.type == "epoch")
        append_events(run, replace(last, epoch=19))
        await wait_until(pilot, lambda: "epochs 19/30" in visible_text(pilot, "#run-preview"))

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_runs_screen_without_room_has_no_preview_and_shows_failure(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j", "j")
        assert not pilot.app.screen.query_one(Preview).region
        assert "rank 1 on GPU-1: CUDA out of memory" in visible_text(pilot, "#all-runs")

    drive(demo_app(demo_runs_folder), act, (80, 16))


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
def test_runs_screen_shows_preview_below_short_list_in_low_terminal(
    demo_runs_folder: Path, size: tuple[int, int]
) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j")
        assert "accuracy" in visible_text(pilot, "#run-preview")
        assert "cifar-4" in visible_text(pilot, "#all-runs")

    drive(demo_app(demo_runs_folder), act, size)


def test_runs_screen_puts_preview_below_list_in_high_terminal(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        preview, runs = pilot.app.screen.query_one(Preview), pilot.app.screen.query_one("#all-runs")
        assert preview.region.y == runs.region.bottom
        assert "Changed config keys" in visible_text(pilot, "#run-preview")

    drive(demo_app(demo_runs_folder), act, (100, 40))


def test_runs_screen_with_many_runs_shows_figures_in_preview(many_runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        assert "Changed config keys" in visible_text(pilot, "#run-preview")
        assert "43 runs" in visible_text(pilot, "#all-runs")

    drive(demo_app(many_runs), act, WIDE)


def test_runs_screen_filter_counts_matches_and_names_what_does_not_match(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "slash", *"digits")
        assert "1 of 3 match 'digits'" in visible_text(pilot, "#all-runs")
        await press(pilot, "x")
        assert "No run matches 'digitsx'; press esc to show all runs" in visible_text(pilot, "#all-runs")
        assert "0 of 3 match 'digitsx'" in visible_text(pilot, "#all-runs")
        await press(pilot, "escape")
        assert "3 runs" in visible_text(pilot, "#all-runs")

    drive(demo_app(demo_runs_folder), act)


def test_runs_screen_marks_foreign_run_in_narrow_terminal(demo_runs_folder: Path) -> None:
    (demo_runs_folder / FINISHED_RUN).chmod(0o777)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j")
        shown = visible_text(pilot, "#all-runs")
        assert f"○!{FINISHED_RUN}" in shown
        assert "This run is writable by all users" in visible_text(pilot, "#run-preview")

    drive(demo_app(demo_runs_folder), act, (80, 24))


def test_runs_screen_click_selects_and_double_click_opens(many_runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        runs = pilot.app.screen.query_one("#all-runs", Lines)
        for row in (10, runs.size.height - 2, 0):
            name = runs._rows[row].key
            # The frame and the header take a line each.
            await pilot.click("#all-runs", offset=(5, row + 2))
            await wait_until_idle(pilot)
            assert runs.selected_key == name
        await pilot.click("#all-runs", offset=(5, 2), times=2)
        await wait_until_idle(pilot)
        assert isinstance(pilot.app.screen, RunScreen)
        assert str(pilot.app.screen.folder.path) == name

    drive(demo_app(many_runs), act, WIDE)


def test_runs_screen_wheel_scrolls(many_runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        from textual import events

        await press(pilot, "r")
        runs = pilot.app.screen.query_one("#all-runs", Lines)
        top = runs.scroll_offset.y
        await pilot._post_mouse_events([events.MouseScrollDown], "#all-runs", offset=(5, 5))
        await wait_until_idle(pilot)
        assert runs.scroll_offset.y > top

    drive(demo_app(many_runs), act, (100, 24))


def test_runs_screen_footer_shows_what_works_for_selected_run(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        assert "s stop" in visible_text(pilot, "Keys")
        assert "u resume" not in visible_text(pilot, "Keys")
        await press(pilot, "j")
        assert "s stop" not in visible_text(pilot, "Keys")
        assert "u resume" in visible_text(pilot, "Keys")

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_runs_screen_keeps_end_of_long_names(demo_runs_folder: Path) -> None:
    for tail in ("a", "b"):
        shutil.copytree(demo_runs_folder / FINISHED_RUN, demo_runs_folder / f"{'a-long-name-' * 5}variant-{tail}")

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        assert "…" in visible_text(pilot, "#all-runs")
        assert "variant-a " in visible_text(pilot, "#all-runs")
        assert "variant-b " in visible_text(pilot, "#all-runs")

    drive(demo_app(demo_runs_folder), act, (80, 24))


def test_runs_screen_without_runs_says_what_to_do(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        assert isinstance(pilot.app.screen, RunsScreen)
        assert "No runs yet; press n to start one" in visible_text(pilot, "#all-runs")
        await press(pilot, "enter", "s", "u", "a")
        assert isinstance(pilot.app.screen, RunsScreen)
        await press(pilot, "n")
        assert isinstance(pilot.app.screen, FormScreen)

    drive(real_app(tmp_path / "runs"), act, WIDE)
