"""Where the screens have their panels in the smallest terminal and in a large one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from support.runs.compared_runs import make_compared_run
from support.runs.profiles import make_profiled_run
from support.runs.sweeps import make_finished_trials
from support.screen.demo_app import (
    clipped_widgets,
    demo_app,
    no_gpu_feed,
    wait_until_idle,
)
from support.screen.form_driver import form_of, type_into
from support.screen.layouts import each_layout
from support.screen.mistakes_driver import inspected_run, open_mistakes
from support.screen.queue_rows import QUEUE_ROWS
from support.screen.screen_driver import Drive, drive, open_profile, open_sweep, press, real_app, return_to_first_screen

pytestmark = pytest.mark.usefixtures("isolated_folder")

Layouts = dict[tuple[int, int], str]
LOWEST, SMALLEST, SMALL, LARGE, LARGEST = (60, 15), (60, 20), (80, 24), (160, 48), (200, 60)


DEMO_LAYOUTS: dict[str, Layouts] = {
    "": {
        SMALLEST: "gpus / runs",
        SMALL: "gpus / processes / runs",
        LARGEST: "gpus / processes / runs",
    },
    "enter": {
        SMALLEST: "util memory_used power / facts / processes",
        LARGEST: "util memory_used power / sm_active tensor_active temperature / facts / processes",
    },
    "r": {LOWEST: "all-runs", LARGEST: "all-runs"},
    "r enter": {
        SMALLEST: "progress / bottleneck / chart-0 / ranks",
        LARGEST: "progress / bottleneck / chart-0 chart-1 / chart-2 chart-3 / ranks / log",
    },
    "r enter v": {
        LOWEST: "scores / matrix",
        SMALLEST: "scores / matrix / pairs classes",
        LARGEST: "scores / matrix pairs / classes",
    },
    "n": {
        SMALLEST: "field-lines / plan / about",
        LARGEST: "field-lines plan / command / about",
    },
    "Q down": {
        SMALLEST: "queue / queue-gpus / queue-reason",
        LARGEST: "queue queue-gpus / queue-reason",
    },
}
"""The keys that open a screen from the monitor, and its panels by the size of the terminal. Pictures hold others."""


def test_screens_have_panels_that_fit_the_terminal(demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.screens.pollers.files.list_queue", lambda: QUEUE_ROWS)

    async def act(pilot: Pilot[None]) -> None:
        for keys, layouts in DEMO_LAYOUTS.items():
            await press(pilot, *keys.split())
            async for _ in each_layout(pilot, layouts):
                pass
            await return_to_first_screen(pilot)

    drive(demo_app(demo_runs_folder), act)


def make_runs_to_compare(root: Path) -> None:
    for number in range(8):
        make_compared_run(root, f"sweep-{number}", lr=0.02 * (number + 1), epochs=1)


async def open_compare(pilot: Pilot[None]) -> None:
    await press(pilot, "r", "M", "c")


@pytest.mark.parametrize(
    ("make", "open_it", "layouts"),
    [
        (
            make_runs_to_compare,
            open_compare,
            {
                SMALLEST: "compare-chart / compared-runs",
                LARGE: "compare-chart / compared-runs",
            },
        ),
        (
            make_finished_trials,
            open_sweep,
            {
                LOWEST: "sweep-status / trial-curves param-chart / trials params",
                LARGE: "sweep-status / trial-curves param-chart / trials params",
            },
        ),
        (make_profiled_run, open_profile, {SMALLEST: "profile-status / profile"}),
        (
            lambda root: inspected_run(root, root.parent / "photos"),
            open_mistakes,
            {SMALLEST: "inspected / list-tabs / images / picture / facts"},
        ),
    ],
    ids=["compare", "sweep", "profile", "mistakes"],
)
def test_screen_of_results_has_panels_that_fit_the_terminal(
    tmp_path: Path, make: Callable[[Path], object], open_it: Drive, layouts: Layouts
) -> None:
    run = make(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        await open_it(pilot)
        async for _ in each_layout(pilot, layouts, fills=False):
            pass

    drive(real_app(tmp_path / "runs", run.name if isinstance(run, RunFolder) else None), act)


def test_form_clips_neither_errors_nor_choices_in_small_terminal(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "many")
        await type_into(pilot, "optim.lr", "-1")
        for size in (SMALLEST, SMALL):
            await pilot.resize_terminal(*size)
            await wait_until_idle(pilot)
            assert clipped_widgets(pilot.app.screen) == []
            form_of(pilot).fields.select("schedule.name")
            await press(pilot, "enter", "down")
            assert form_of(pilot).fields.is_open
            assert clipped_widgets(pilot.app.screen) == []
            await press(pilot, "escape")

    drive(demo_app(tmp_path / "runs", no_gpu_feed(), demo=None), act)
