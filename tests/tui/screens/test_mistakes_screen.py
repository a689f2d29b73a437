"""The screen of the mistakes: its lists, the picture and the facts of an image."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from engine.runs.inspection import write_inspection
from support.messages import has_problem, says
from support.replace import replace
from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.mistakes_driver import drawn, inspected_run, open_mistakes, six_images
from support.screen.screen_driver import drive, press, real_app
from tui.screens.widgets.lines import Lines
from tui.screens.widgets.picture import PicturePanel


@pytest.fixture
def run(tmp_path: Path, isolated_folder: None) -> RunFolder:
    return inspected_run(tmp_path / "runs", tmp_path / "photos")


def drive_run(run: RunFolder, act: object, size: tuple[int, int] = (120, 34)) -> None:
    drive(demo_app(run.path.parent, run=run.name), act, size, notifications=True)  # type: ignore[arg-type]


def listed(pilot: Pilot[None]) -> list[str]:
    """The lines of the list without its frame and headings."""
    lines = [line.strip("│╭╮╰╯ ▁▂▃▄▅▆▇█") for line in visible_text(pilot, "#images").splitlines()[2:-1]]
    return [line for line in lines if line]


def test_mistakes_screen_keys_choose_image_and_list(run: RunFolder, tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await open_mistakes(pilot)
        assert [line.split()[0] for line in listed(pilot)] == ["4.6052", "2.3026"]
        await press(pilot, "j", "ctrl+y")
        assert pilot.app.clipboard == str(tmp_path / "photos/cat/tabby.png")
        await press(pilot, "right")
        assert [line.split()[0] for line in listed(pilot)] == ["98.00%", "90.00%", "36.00%"]
        await press(pilot, "tab")
        assert [line.split()[0] for line in listed(pilot)][:2] == ["0.0200", "0.0200"]
        await press(pilot, "right", "right", "left")
        assert "Suspected wrong labels" in visible_text(pilot, "#images")

    drive_run(run, act)


def test_mistakes_screen_reports_other_epoch_and_damaged_files(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "photos/cat/tabby\udcff.png").write_text("no image")
    (tmp_path / "photos/cat/a dog, really.png").unlink()
    six = six_images(tmp_path / "photos")
    assert six.paths is not None
    paths = [path.replace("tabby", "tabby\udcff") for path in six.paths]
    write_inspection(run, replace(six, info=replace(six.info, epoch=3), paths=paths))

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_mistakes(pilot)
        assert says(visible_text(pilot, "#picture"), "bad-image", "No such file or directory")
        await press(pilot, "down")
        await drawn(pilot)
        result = screen.query_one("#picture", PicturePanel)._poller.value
        assert result is not None and result.problem is not None
        assert has_problem([result.problem], "bad-image", "", "tabby\udcff.png")
        assert "tabby\\udcff.png" in visible_text(pilot, "#picture").replace(" ", "").replace("\n", "")
        assert "is of epoch 3, not of epoch 7; run `gputrain evaluate" in visible_text(pilot, "#inspected")
        await press(pilot, "ctrl+y")
        [toast] = pilot.app._notifications
        assert says(toast.message, "invalid-name", "tabby\\udcff")
        assert len(listed(pilot)) == 2
        os.truncate(run.inspection, 100)
        await wait_until(pilot, lambda: screen.inspection_poller.problem is not None)
        await wait_until_idle(pilot)
        assert has_problem([screen.inspection_poller.problem], "damaged", "", "inspection.npz")
        assert "inspection.npz " in visible_text(pilot, "#inspected")

    drive_run(run, act, (160, 48))


def test_mistakes_screen_without_results_names_the_command_and_shows_them_when_they_come(run: RunFolder) -> None:
    ready = run.path / "ready.npz"
    run.inspection.rename(ready)

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_mistakes(pilot)
        assert f"`gputrain evaluate {run.name} --list mistakes`" in visible_text(pilot, "#inspected")
        ready.rename(run.inspection)
        await wait_until(pilot, lambda: screen.inspection_poller.value is not None)
        await drawn(pilot)
        assert len(listed(pilot)) == 2
        assert screen.query_one("#images", Lines).has_focus

    drive(real_app(run.path.parent, run.name), act, (120, 34))
