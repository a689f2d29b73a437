"""Where the screens have their panels, and which columns they show, at sizes from 60x20 to 200x60."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from engine.runs.trash import move_to_trash
from support.runs.compared_runs import make_compared_run
from support.runs.event_factories import make_run_started, make_step
from support.runs.factories import make_run_folder
from support.runs.profiles import PROFILE, store_profile
from support.runs.sweeps import make_finished_trials
from support.screen.demo_app import (
    clipped_widgets,
    demo_app,
    four_rank_run,
    no_gpu_feed,
    visible_text,
    wait_until,
    wait_until_idle,
)
from support.screen.form_driver import form_of, type_into
from support.screen.layouts import each_layout, header_of, region_of
from support.screen.mistakes_driver import inspected_run, open_mistakes
from support.screen.queue_rows import QUEUE_ROWS
from support.screen.screen_driver import drive, open_profile, open_sweep, press, real_app
from tui.demo.server import LIVE_RUN
from tui.screens.compare import CompareScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")

SIZES = SMALLEST, SMALL, MEDIUM, LARGE, LARGEST = (60, 20), (80, 24), (120, 34), (160, 48), (200, 60)


def test_monitor_puts_panels_side_by_side_and_shows_more_of_each_gpu(demo_runs_folder: Path) -> None:
    stacked, beside = "gpus / processes / runs", "gpus / processes runs / preview / host"
    layouts = {SMALLEST: stacked, SMALL: stacked, MEDIUM: beside, LARGE: beside, LARGEST: beside}
    gpus = {
        SMALLEST: "GPU util memory GiB power W temp used by",
        SMALL: "GPU util SM memory GiB power W temp used by last 10 min",
    }
    readings = {MEDIUM: "temp power tensor", LARGE: "temp power tensor clock", LARGEST: "temp power clock PCIe state"}
    with_host_memory = {SMALL, LARGE, LARGEST}

    async def act(pilot: Pilot[None]) -> None:
        async for size in each_layout(pilot, layouts):
            assert header_of(pilot, "gpus") == gpus[size] if size in gpus else "used by" in header_of(pilot, "gpus")
            text = visible_text(pilot, "#gpus")
            assert all(name in text for name in readings.get(size, "").split())
            assert ("host memory" in header_of(pilot, "processes")) is (size in with_host_memory)
            assert ("accuracy" in visible_text(pilot, "#preview")) is (size >= MEDIUM)
            # Each GPU has as many lines as fit; in a small terminal, the list scrolls.
            assert (text.count("fashion-17 rank"), region_of(pilot, "gpus").height) == {
                SMALLEST: (2, 8), SMALL: (2, 11), MEDIUM: (3, 19), LARGE: (3, 27), LARGEST: (3, 35)
            }[size]  # fmt: skip

    drive(demo_app(demo_runs_folder), act)


def test_monitor_without_gpu_is_filled_by_host_and_preview(demo_runs_folder: Path) -> None:
    beside = "host runs / preview"
    layouts = {SMALLEST: "host / runs", SMALL: "host / runs / preview", MEDIUM: beside, LARGE: beside, LARGEST: beside}

    async def act(pilot: Pilot[None]) -> None:
        async for size in each_layout(pilot, layouts):
            assert region_of(pilot, "host").height == {SMALLEST: 6, SMALL: 7}.get(size, size[1] - 2)

    drive(demo_app(demo_runs_folder, no_gpu_feed()), act)


def test_run_shows_more_charts_and_the_past_of_the_ranks_with_more_room(demo_runs_folder: Path) -> None:
    status, four = "progress / bottleneck", "loss accuracy / lr grad_norm / ranks / log"
    layouts = {
        SMALLEST: f"{status} / loss / ranks",
        SMALL: f"{status} / loss accuracy / ranks / log",
        MEDIUM: f"{status} / loss accuracy / lr ranks / log",
        LARGE: f"{status} / {four}",
        LARGEST: f"{status} / {four}",
    }
    past = {SMALLEST: "", SMALL: "-2 min now", MEDIUM: "-2 min now", LARGE: "-10 min -5 min now"}

    async def act(pilot: Pilot[None]) -> None:
        async for size in each_layout(pilot, layouts):
            ranks = header_of(pilot, "ranks")
            assert ranks.startswith("rank GPU util memory GiB power W temp data wai")
            assert ranks.endswith(past.get(size, "-4 min -2 min now"))
            assert ("step 278/469" in visible_text(pilot, "#progress")) is (size != SMALLEST)

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)


def test_failed_run_shows_its_whole_message_at_each_size(demo_runs_folder: Path) -> None:
    layouts = {
        SMALLEST: "progress / message / loss / ranks",
        SMALL: "progress / message / loss accuracy / ranks / log",
        MEDIUM: "progress / message / loss accuracy / lr ranks / log",
        LARGE: "progress / message / loss accuracy / lr grad_norm / ranks / log",
    }

    async def act(pilot: Pilot[None]) -> None:
        async for size in each_layout(pilot, layouts):
            assert region_of(pilot, "message").height == {SMALLEST: 5, SMALL: 3}.get(size, 2)
            words = visible_text(pilot, "#message").replace("┃", "").split()
            assert words[-3:] == ["`gputrain", "resume", "cifar-4`"]

    drive(demo_app(demo_runs_folder, run="cifar-4"), act)


def test_run_of_four_ranks_shows_all_of_them_at_each_size(tmp_path: Path) -> None:
    owner = four_rank_run(tmp_path / "runs")
    lines_per_rank = {SMALL: 1, MEDIUM: 1, LARGE: 2, LARGEST: 2}

    async def act(pilot: Pilot[None]) -> None:
        for size, lines in lines_per_rank.items():
            await pilot.resize_terminal(*size)
            await wait_until_idle(pilot)
            rows = [row.strip("│ ") for row in visible_text(pilot, "#ranks").splitlines()[2:-1]]
            assert [row.split()[0] for row in rows][::lines] == ["0", "1", "2", "3"], size

    drive(demo_app(tmp_path / "runs", run="wide-4"), act)
    owner.release()


def test_runs_show_more_columns_with_more_room(demo_runs_folder: Path) -> None:
    layouts = {(60, 15): "all-runs"} | dict.fromkeys(SIZES, "all-runs / run-preview")
    last_column = {(60, 15): "acc", SMALLEST: "acc", SMALL: "model", MEDIUM: "batch"}

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        async for size in each_layout(pilot, layouts):
            columns = header_of(pilot, "all-runs").split()
            assert (columns[0], columns[-1]) == ("name", last_column.get(size, "images/s"))
            assert region_of(pilot, "all-runs").height == (13 if size == (60, 15) else 6)

    drive(demo_app(demo_runs_folder), act)


def test_form_hides_chart_and_command_in_narrow_terminal(demo_runs_folder: Path) -> None:
    beside = "field-lines form-lr / plan / command / about"
    layouts = {SMALLEST: "field-lines / plan / about"} | dict.fromkeys(SIZES[1:], beside)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        async for size in each_layout(pilot, layouts):
            assert region_of(pilot, "fields").width == (60 if size == SMALLEST else size[0] * 3 // 5)
            assert region_of(pilot, "about").height == (3 if size == SMALLEST else 2)
            rows = [row[1:].rstrip("│▁▂▃▄▅▆▇█ ") for row in visible_text(pilot, "#field-lines").splitlines()]
            notes = {row[2:20].strip(): row[40:] for row in rows}
            # Facts are beside the values first, then summaries where they fit, and all fields where the list fits.
            assert bool(notes["dataset"]) is (size >= MEDIUM)
            assert bool(notes["epochs"]) is (size >= LARGE)
            assert ("seed" in notes) is (size >= LARGE)

    drive(demo_app(demo_runs_folder), act)


def test_gpu_shows_six_graphs_unless_the_terminal_is_small(demo_runs_folder: Path) -> None:
    graphs = "util memory_used power / sm_active tensor_active temperature"
    layouts = {SMALLEST: "util memory_used power / facts / processes"} | dict.fromkeys(
        SIZES[1:], f"{graphs} / facts / processes"
    )

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        async for size in each_layout(pilot, layouts):
            # A low terminal has one group of readings per line, without a frame.
            assert visible_text(pilot, "#facts").startswith("╭") is (size >= MEDIUM)
            # A graph that is wide enough has its mean in the frame, one that is high enough its axis.
            assert ("mean" in visible_text(pilot, "#util")) is (size >= MEDIUM)
            assert ("┤" in visible_text(pilot, "#util")) is (size >= MEDIUM)

    drive(demo_app(demo_runs_folder), act)


def test_confusion_puts_rankings_below_the_matrix_in_narrow_terminal(demo_runs_folder: Path) -> None:
    beside, below = "scores / matrix pairs / classes", "scores / matrix / pairs classes"
    layouts = {(60, 15): "scores / matrix", SMALLEST: below, SMALL: below, MEDIUM: beside, LARGE: beside}

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "v")
        async for size in each_layout(pilot, layouts):
            assert region_of(pilot, "matrix").width == (size[0] - 46 if size >= MEDIUM else size[0])

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)


def test_mistakes_screen_lists_images_beside_the_picture_at_each_size(tmp_path: Path) -> None:
    run = inspected_run(tmp_path / "runs", tmp_path / "photos")
    panels = "inspected / list-tabs / images / picture / facts"
    layouts = dict.fromkeys(((60, 20), (80, 24), (120, 34), (160, 48)), panels)

    async def act(pilot: Pilot[None]) -> None:
        await open_mistakes(pilot)
        async for columns, rows in each_layout(pilot, layouts, fills=False):
            more = "p(pred) p(label) margin " if columns >= 160 else ""
            assert header_of(pilot, "images") == f"loss {more}image"
            images, picture = region_of(pilot, "images"), region_of(pilot, "picture-panel")
            assert images.right == picture.x and images.bottom == picture.bottom == rows - 1

    drive(real_app(run.path.parent, run.name), act)


def test_profile_screen_is_filled_by_its_panel_at_each_size(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path / "runs", "a", make_run_started(), make_step(10))
    store_profile(run, PROFILE)
    layouts = dict.fromkeys(((60, 20), (80, 24), (160, 48)), "profile-status / profile")

    async def act(pilot: Pilot[None]) -> None:
        await open_profile(pilot)
        async for size in each_layout(pilot, layouts):
            rows = [row.strip("│ ▁▂▃▄▅▆▇█") for row in visible_text(pilot, "#profile").splitlines()[1:-1]]
            (titles,) = [row.split() for row in rows if row.startswith("ms  ")]
            # Parts of a step that take no time are omitted where they do not fit.
            assert ("copy" in titles, "other" in titles) == ((False, False) if size == (60, 20) else (True, True))
            # The bar of the slowest rank ends at the right edge, but for a part that is shorter than a cell.
            assert len(next(row for row in rows if row.startswith("rank 1"))) in (size[0] - 3, size[0] - 2)

    drive(real_app(run.path.parent, "a"), act)


def test_sweep_screen_hides_results_in_small_terminal(tmp_path: Path) -> None:
    make_finished_trials(tmp_path / "runs")
    trials = "sweep-status / trials"
    narrow, wide = f"{trials} / best-so-far", f"{trials} / best-so-far importance"
    layouts = {(60, 15): trials, (60, 20): narrow, (80, 24): narrow, (120, 34): wide, (160, 48): wide}

    async def act(pilot: Pilot[None]) -> None:
        await open_sweep(pilot)
        async for size in each_layout(pilot, layouts, fills=False):
            last = "" if size[0] == 60 else " crop_padding"
            assert header_of(pilot, "trials") == f"trial state best val acc epoch lr optim{last}"

    drive(real_app(tmp_path / "runs"), act)


def test_compare_of_eight_runs_has_more_charts_with_more_room(tmp_path: Path) -> None:
    folders = [make_compared_run(tmp_path / "runs", f"sweep-{n}", lr=0.02 * (n + 1), epochs=1).path for n in range(8)]
    runs, one, two = "compared-runs differences", "train_loss", "train_loss best_val_accuracy"
    four = f"{two} / best_val_loss lr / {runs}"
    layouts = {(60, 20): f"{one} / {runs}", (80, 24): f"{one} / {runs}", (120, 34): f"{two} / {runs}", (160, 48): four}
    columns = {(60, 20): "6 more A B", (80, 24): "5 more A B C", (120, 34): "2 more A B C D E F"}

    app = demo_app(tmp_path / "runs", no_gpu_feed(), demo=None)

    async def act(pilot: Pilot[None]) -> None:
        app.open_compare(folders, None)
        await pilot.pause()
        screen = pilot.app.screen
        assert isinstance(screen, CompareScreen)
        await wait_until(pilot, lambda: screen.compare_poller.caught_up)
        screen._rebuild()
        async for size in each_layout(pilot, layouts):
            assert header_of(pilot, "differences") == columns.get(size, "A B C D E F G H")

    drive(app, act)


def test_queue_shows_more_columns_with_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.pollers.files.list_queue", lambda: QUEUE_ROWS)
    layouts = dict.fromkeys(((60, 20), (80, 24), (120, 34), (160, 48)), "queue-status / queue / queue-reason")

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "Q", "down")
        async for columns, _ in each_layout(pilot, layouts):
            shown = "state" if columns == 60 else "user state gpus" if columns == 80 else "user state gpus priority"
            assert header_of(pilot, "queue") == f"# name {shown} waits reason"
            assert region_of(pilot, "queue-reason").height == 4

    drive(demo_app(tmp_path / "runs"), act)


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


def test_trash_fills_each_size(demo_runs_folder: Path) -> None:
    move_to_trash(RunFolder(demo_runs_folder / "cifar-4"))

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "z")
        await wait_until(pilot, lambda: "Trash: 1 run" in visible_text(pilot))
        async for size in each_layout(pilot, dict.fromkeys(SIZES, "trash")):
            assert "cifar-4" in visible_text(pilot, "#trash"), size

    drive(real_app(demo_runs_folder), act)


@pytest.mark.parametrize(
    ("run", "keys", "max_margin"),
    [(LIVE_RUN, ("question_mark", "l", "d"), 0.3), (None, ("w",), 0.35)],
    ids=["run", "runs"],
)
def test_dialogs_are_in_the_middle_of_each_size(
    demo_runs_folder: Path, run: str | None, keys: Sequence[str], max_margin: float
) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, *("r" if run is None else ""))
        for width, height in SIZES:
            await pilot.resize_terminal(width, height)
            for key in keys:
                await press(pilot, key)
                region = pilot.app.screen.query_one(".dialog").region
                assert abs(width - region.right - region.x) <= 1 and abs(height - region.bottom - region.y) <= 1
                assert 0 < region.x < max_margin * width and 0 < region.y < max_margin * height
                assert clipped_widgets(pilot.app.screen) == []
                await pilot.press("escape")

    drive(demo_app(demo_runs_folder, run=run), act)
