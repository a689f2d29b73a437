"""The compare screen: curves of several runs, readout, baseline, bands of seeds, and runs that change or vanish."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.events import RunFinished, StepEvent
from engine.runs.journal import to_line
from engine.runs.ownership import Ownership
from support.messages import says
from support.replace import replace
from support.runs.compared_runs import STEPS_PER_EPOCH, compared_events, make_compared_run
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import append_to_journal, make_run_folder
from support.screen.demo_app import visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, real_app
from tui.app import GputrainApp
from tui.screens.compare import CompareScreen
from tui.screens.compare_panels import RUNS_PANEL, TABLE_PANEL
from tui.screens.run import RunScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")
SIZE = (120, 34)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    make_compared_run(root, "slow", lr=0.05)
    make_compared_run(root, "fast", lr=0.2)
    for seed in range(3):
        make_compared_run(root, f"seed-{seed}", seed=seed)
    return root


async def compare(pilot: Pilot[None], root: Path, names: Sequence[str], baseline: int | None = None) -> CompareScreen:
    app = pilot.app
    assert isinstance(app, GputrainApp)
    app.open_compare([root / name for name in names], baseline)
    await pilot.pause()
    screen = app.screen
    assert isinstance(screen, CompareScreen)
    await until_shown(pilot, screen)
    return screen


def toasts(pilot: Pilot[None]) -> list[str]:
    return [toast.message for toast in pilot.app._notifications]


async def until_shown(pilot: Pilot[None], screen: CompareScreen) -> None:
    """Wait until all that has been read is drawn."""
    poller = screen.compare_poller
    await wait_until(pilot, lambda: poller.caught_up)
    screen._rebuild()
    await wait_until(pilot, lambda: not screen._charts_to_draw)
    await pilot.pause()


def test_compare_overlays_the_curves_of_all_runs(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast"])
        chart = screen.query_one("#train_loss")
        assert [curve.label for curve in chart.curves] == ["slow", "fast"]  # type: ignore[attr-defined]
        text = visible_text(pilot, "#train_loss")
        assert text.count("A") > 2
        assert text.count("B") > 2
        runs = visible_text(pilot, f"#{RUNS_PANEL}")
        assert "A slow" in runs
        assert "B fast" in runs
        screen.action_seeds()
        await pilot.pause()
        [toast] = toasts(pilot)
        assert says(toast, "not-found")

    drive(real_app(root), act, SIZE)


def test_compare_lists_differing_keys_and_marks_the_best_figures(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await compare(pilot, root, ["slow", "fast"])
        table = visible_text(pilot, f"#{TABLE_PANEL}")
        assert "1 config key differs" in table
        keys = [line for line in table.splitlines() if "optim." in line or "run." in line]
        assert [line.split()[0].strip("│") for line in keys] == ["optim.lr"]
        best = next(line for line in table.splitlines() if "best val acc" in line)
        assert best.count("*") == 1

    drive(real_app(root), act, SIZE)


def test_compare_readout_follows_the_cursor(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast"])
        before = visible_text(pilot, f"#{RUNS_PANEL}")
        assert "train loss, latest" in before
        await pilot.press(*["left"] * 11)
        await wait_until_idle(pilot)
        after = visible_text(pilot, f"#{RUNS_PANEL}")
        assert "train loss, epoch 3.6" in after
        values = [curve.values.value_at(screen.view.cursor or 0) for curve in screen.active_chart.curves]
        assert all(f"{value:.4f}" in after for value in values if value is not None)

    drive(real_app(root), act, SIZE)


def test_compare_readout_has_no_value_behind_the_end_of_a_run(root: Path) -> None:
    make_compared_run(root, "short", lr=0.3, epochs=1)

    async def act(pilot: Pilot[None]) -> None:
        await compare(pilot, root, ["short", "slow"])
        await press(pilot, "left")
        lines = visible_text(pilot, f"#{RUNS_PANEL}").splitlines()
        assert "–" in next(line for line in lines if "A short" in line)
        assert "–" not in next(line for line in lines if "B slow" in line)

    drive(real_app(root), act, SIZE)


def test_compare_switches_between_all_x_axes(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast"])
        lengths = {}
        for _ in range(4):
            lengths[screen.view.axis] = screen.active_chart.window.high
            assert screen.view.axis in visible_text(pilot, "#train_loss")
            await press(pilot, "x")
        assert lengths["epoch"] == 4
        assert lengths["step"] == 4 * STEPS_PER_EPOCH
        assert lengths["images"] == 64 * lengths["step"]
        assert lengths["hours"] == pytest.approx(0.1 * lengths["step"] / 3600)

    drive(real_app(root), act, SIZE)


def test_compare_shows_seeds_as_one_band_and_expands_it(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["seed-0", "fast", "seed-1", "seed-2"])
        assert "A seed-0 ×3" in visible_text(pilot, f"#{RUNS_PANEL}")
        assert "░" in visible_text(pilot, "#best_val_accuracy")
        assert "±" in visible_text(pilot, f"#{TABLE_PANEL}")
        assert "each seed" in visible_text(pilot, "Keys")
        await press(pilot, "B")
        assert [entry.name for entry in screen.data.entries] == ["seed-0", "fast", "seed-1", "seed-2"]
        assert "░" not in visible_text(pilot, "#best_val_accuracy")
        await press(pilot, "shift+tab", "shift+tab", "end", "P", "B")
        assert (len(screen.data.entries), screen.data.baseline) == (2, 0)

    drive(real_app(root), act, SIZE)


def test_compare_pins_and_unpins_a_baseline(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast", "seed-0"])
        await pilot.press("shift+tab", "shift+tab", "down", "P")
        await wait_until_idle(pilot)
        assert screen.data.baseline == 1
        runs = visible_text(pilot, f"#{RUNS_PANEL}").splitlines()
        assert "baseline" in next(line for line in runs if "B fast" in line)
        assert "+" in next(line for line in runs if "A slow" in line)
        assert "(-0." in visible_text(pilot, f"#{TABLE_PANEL}")
        assert "differences from B" in visible_text(pilot, "#train_loss")
        await press(pilot, "P")
        assert screen.data.baseline is None
        assert "baseline" not in visible_text(pilot, f"#{RUNS_PANEL}")

    drive(real_app(root), act, SIZE)


def test_compare_opens_the_selected_run(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await compare(pilot, root, ["slow", "fast"])
        await pilot.press("shift+tab", "shift+tab", "down")
        await press(pilot, "enter")
        screen = pilot.app.screen
        assert isinstance(screen, RunScreen)
        assert screen.folder.name == "fast"
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, CompareScreen)

    drive(real_app(root), act, SIZE)


def test_compare_zooms_smooths_and_fills_the_screen(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast"])
        await pilot.press("m", "L", "plus", "plus", "comma")
        await wait_until_idle(pilot)
        assert screen.view.smoothing == 0.1
        assert screen.active_chart.window.high - screen.active_chart.window.low == pytest.approx(1.0)
        await press(pilot, "f")
        assert screen.query_one("#train_loss").size.height > 28
        await pilot.press("f", "shift+tab", "f")
        await wait_until_idle(pilot)
        assert screen.query_one(f"#{TABLE_PANEL}").size.width > 110
        await press(pilot, "f", "0")
        assert screen.view.span is None

    drive(real_app(root), act, SIZE)


def test_compare_exports_all_curves_with_their_names(root: Path, tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await compare(pilot, root, ["slow", "fast"])
        await press(pilot, "e")

    drive(real_app(root), act, SIZE)
    rows = (tmp_path / "compare-train_loss.csv").read_text().splitlines()
    assert rows[0] == "curve,epoch,value"
    assert {row.split(",")[0] for row in rows[1:]} == {"slow", "fast"}
    assert "A slow" in (tmp_path / "compare-train_loss.svg").read_text()


def test_compare_follows_a_live_run(root: Path) -> None:
    *events, _ = compared_events(epochs=4)
    half = len(events) // 2
    live = make_run_folder(root, "live", *events[:half])
    owner = Ownership(live)

    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "live"])
        steps = screen.data.entries[1].runs[0].last_step  # type: ignore[union-attr]
        assert "running" in visible_text(pilot, f"#{RUNS_PANEL}")
        append_to_journal(live, "".join(to_line(event) + "\n" for event in events[half:]))
        await wait_until(pilot, lambda: screen.compare_poller.runs[1].curves.last_step > steps)  # type: ignore[union-attr]
        append_to_journal(live, to_line(RunFinished(time=50.0, state="finished")) + "\n")
        owner.release()
        await wait_until(pilot, lambda: not screen.compare_poller.runs[1].is_live)
        await until_shown(pilot, screen)
        assert screen.data.entries[1].runs[0].last_step == 4 * STEPS_PER_EPOCH  # type: ignore[union-attr]

    drive(real_app(root), act, SIZE)


def test_compare_keeps_a_run_that_is_deleted(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast"])
        shutil.rmtree(root / "fast")
        await wait_until(pilot, lambda: screen.compare_poller.runs[1].is_missing)
        await until_shown(pilot, screen)
        assert "fast was deleted" in visible_text(pilot, "#message")
        assert len(screen.active_chart.curves[1].series.x) == 4 * STEPS_PER_EPOCH

    drive(real_app(root), act, SIZE)


def test_compare_of_runs_without_steps_damaged_journals_and_nan_losses(root: Path) -> None:
    make_run_folder(root, "empty")
    damaged = make_run_folder(root, "damaged", make_run_started())
    damaged.journal.write_bytes(damaged.journal.read_bytes() + b"\0\xff{]\n" * 9)
    nan = [make_run_started(), *(replace(make_epoch(1, math.nan), val_loss=math.nan) for _ in range(2))]
    nan.append(
        StepEvent(time=1.0, step=10, epoch=1, losses=[math.nan] * 10, lr=0.1, images_per_second=1.0, data_wait=0.0)
    )
    make_run_folder(root, "nan", *nan)

    async def act(pilot: Pilot[None]) -> None:
        await compare(pilot, root, ["empty", "damaged", "nan", "slow"])
        assert "config.yaml cannot be read" in visible_text(pilot, "#message")
        await pilot.press("L", "m", "x", "x", "x", "plus", "left", "tab", "tab", "tab", "tab", "f", "f")
        await wait_until_idle(pilot)
        assert "D slow" in visible_text(pilot, f"#{RUNS_PANEL}")

    drive(real_app(root), act, SIZE)


@pytest.mark.parametrize("count", [1, 16])
def test_compare_of_one_and_of_many_runs(tmp_path: Path, count: int) -> None:
    root = tmp_path / "many"
    for number in range(count):
        make_compared_run(root, f"[bold]n{number}\x1b[31m", lr=0.01 * (number + 1), epochs=1)

    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, sorted(path.name for path in root.iterdir()))
        assert len(screen.data.entries) == count
        assert "[bold]n0\\x1b[31m" in visible_text(pilot, f"#{RUNS_PANEL}")
        await pilot.press("shift+tab", "shift+tab", *["down"] * count, "P", "left")
        await wait_until_idle(pilot)
        assert screen.data.baseline == count - 1

    drive(real_app(root), act, (80, 24))


def test_compare_refuses_too_many_runs_in_one_sentence(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, GputrainApp)
        app.open_compare([root / "slow"] * 20)
        await pilot.pause()
        assert not isinstance(app.screen, CompareScreen)
        [toast] = toasts(pilot)
        assert says(toast, "too-many", "compare: ", "16", "20")

    drive(real_app(root), act, SIZE)


def test_compare_notes_other_datasets_and_a_run_that_others_can_change(root: Path) -> None:
    (root / "fast/config.yaml").write_text("data: {dataset: fake}")
    (root / "fast").chmod(0o777)

    async def act(pilot: Pilot[None]) -> None:
        await compare(pilot, root, ["slow", "fast"])
        message = visible_text(pilot, "#message")
        assert "different datasets" in message
        assert "fast: this run" in message
        assert "B fast" in visible_text(pilot, f"#{RUNS_PANEL}")

    drive(real_app(root), act, SIZE)


def test_compare_opens_the_second_time_with_all_curves(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await compare(pilot, root, ["slow", "fast"])
        await press(pilot, "escape")
        app = pilot.app
        assert isinstance(app, GputrainApp)
        app.open_compare([root / "slow", root / "fast"])
        screen = app.screen
        assert isinstance(screen, CompareScreen)
        assert all(run.curves is not None for run in screen.compare_poller.runs)
        assert screen.compare_poller.comparison is not None
        await pilot.pause()
        await until_shown(pilot, screen)

    drive(real_app(root), act, SIZE)


def test_compare_reads_every_step_when_zoomed_in(root: Path) -> None:
    steps = 20_000
    event = StepEvent(time=1.0, step=steps, epoch=1, losses=[1.0] * steps, lr=0.1, images_per_second=1.0, data_wait=0.0)
    folder = make_run_folder(root, "long", replace(make_run_started(), steps_per_epoch=steps), event)
    assert json.loads(folder.journal.read_text().splitlines()[1])["step"] == steps

    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["long"])
        assert screen.data.block_steps > 1
        await press(pilot, "plus", "plus", "plus")
        await wait_until(
            pilot, lambda: len(screen.compare_poller.runs[0].curves.metrics["train_loss"].points.x) == steps
        )  # type: ignore[union-attr]
        await until_shown(pilot, screen)
        assert screen.data.block_steps == 1
        assert "reduced" not in visible_text(pilot, "#train_loss")

    drive(real_app(root), act, SIZE)
