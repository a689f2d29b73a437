"""The confusion matrix: reading `evaluation.json`, text lines, and the confusion screen."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textual.pilot import Pilot

from engine.base.codec import InvalidRecordError
from engine.report.table import line_text
from engine.runs.evaluations import Mistake, mistakes, read_evaluations, worst_first
from engine.runs.folder import RunFolder
from support.json_files import write_json
from support.messages import says
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder, write_run_record
from support.screen.demo_app import demo_app, visible_text, wait_until
from support.screen.screen_driver import drive
from tui.screens.confusion import ConfusionScreen
from tui.screens.demo.server import LIVE_RUN
from tui.screens.run import RunScreen
from tui.screens.tables.confusion import matrix_lines, mistake_table, scatter_lines, shorten_names
from tui.screens.widgets.matrix import Matrix

Act = Callable[[Pilot[None], ConfusionScreen], Awaitable[None]]


def make_result(counts: list[list[int]], epoch: int = 3) -> dict[str, Any]:
    table = np.array(counts)
    sums = table.sum(1)
    return {
        "epoch": epoch,
        "loss": 0.25,
        "top1": float(np.trace(table) / table.sum()),
        "top5": 1.0,
        "images": int(table.sum()),
        "per_class": [float(row[n] / sums[n]) if sums[n] else None for n, row in enumerate(table)],
        "confusion": {"layout": "dense", "rows": counts},
    }


def make_dense(rows: list[list[int]]) -> dict[str, Any]:
    return make_result(BEST) | {"confusion": {"layout": "dense", "rows": rows}}


def make_sparse(cells: list[int], counts: list[int]) -> dict[str, Any]:
    return make_result(BEST) | {"confusion": {"layout": "sparse", "cells": cells, "counts": counts}}


BEST = [[8, 2, 0], [0, 9, 1], [5, 0, 5]]
LAST = [[9, 1, 0], [0, 4, 6], [0, 0, 0]]
NAMES = ["cat", "dog [bold]", "owl"]


def evaluation(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "classes": NAMES, "last": make_result(LAST, 7), "best": make_result(BEST, 3)} | changes


@pytest.fixture
def demo_run(isolated_folder: None, demo_runs_folder: Path) -> RunFolder:
    return RunFolder(demo_runs_folder / LIVE_RUN)


def drive_confusion(run: RunFolder, act: Act, size: tuple[int, int] = (120, 34)) -> None:
    """Open the confusion screen of a run from its run screen, then call `act`."""

    async def open_and_act(pilot: Pilot[None]) -> None:
        await pilot.press("v")
        screen = pilot.app.screen
        assert isinstance(screen, ConfusionScreen)
        await wait_until(pilot, lambda: screen.evaluation_poller.has_polled)
        await drawn(pilot)
        await act(pilot, screen)

    drive(demo_app(run.path.parent, run=run.name), open_and_act, size)


async def drawn(pilot: Pilot[None], *keys: str) -> None:
    """Press keys and update the screen twice: a panel that just appeared has its size only in the second update."""
    await pilot.press(*keys)
    for _ in range(2):
        screen = pilot.app.screen
        assert isinstance(screen, ConfusionScreen)
        screen.update_content()
        await pilot.pause()


# evaluation.json


def test_read_evaluations_refuses_file_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    os.truncate(tmp_path / "a.json", 1 << 40)
    with pytest.raises(OSError, match="has more than"):
        read_evaluations(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "code", "place"),
    [
        ("{", "damaged", "JSON"),
        (evaluation(format=3), "wrong-version", "format 3"),
        (evaluation(classes=[]), "damaged", "$.classes"),
        (evaluation(best=make_dense([[1, 2], [3]])), "damaged", "$.best.confusion: "),
        (evaluation(best=make_dense(BEST[:2])), "damaged", "$.best.confusion: "),
        (evaluation(best=make_sparse([9], [1])), "damaged", "$.best.confusion: "),
        (evaluation(best=make_sparse([1, 2], [1])), "damaged", "$.best.confusion: "),
        (evaluation(best=make_result(BEST) | {"per_class": [0.5]}), "damaged", "$.best.per_class: "),
    ],
    ids=str,
)
def test_read_evaluations_reports_malformed_file_in_one_sentence(
    tmp_path: Path, content: Any, code: str, place: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidRecordError) as error:
        read_evaluations(path)
    assert (error.value.code, place in str(error.value), "\n" in str(error.value)) == (code, True, False)


def test_mistakes_are_sorted_worst_first() -> None:
    assert [
        (mistake.true_class, mistake.predicted_class, mistake.images, mistake.share)
        for mistake in mistakes(np.array(BEST))
    ] == [
        (2, 0, 5, 0.5),
        (0, 1, 2, 0.2),
        (1, 2, 1, 0.1),
    ]
    assert len(mistakes(np.array(BEST), max_pairs=2)) == 2
    assert mistakes(np.eye(3, dtype=np.int64)) == []


@pytest.mark.parametrize(
    ("width", "line"), [(28, "coat → ankle boot  17  14%"), (40, "coat → ankle boot  17 images  14%")]
)
def test_narrow_list_of_mistakes_drops_a_word_and_cuts_no_name(width: int, line: str) -> None:
    mistake = Mistake(true_class=0, predicted_class=1, images=17, share=0.14)
    assert line_text(mistake_table([mistake], ["coat", "ankle boot"], width).line(mistake)) == line


def test_worst_first_puts_classes_without_images_last() -> None:
    assert worst_first(np.array([0.9, 0.4, np.nan, 0.4])) == [1, 3, 0, 2]
    assert worst_first(np.array([0.9, 0.4, np.nan, 0.4]), "min") == [0, 1, 3, 2]


def test_scatter_plot_puts_predicted_upwards_and_true_to_the_right() -> None:
    assert scatter_lines(np.array([[0.0, 0.0], [10.0, 0.0], [10.0, 10.0]]), 3, 3) == ["● ●", " · ", "●  "]


def test_shortened_keeps_distinguishing_part_of_names() -> None:
    assert shorten_names(["cat", "dog"], 3) == ["cat", "dog"]
    assert shorten_names(["class-07", "class-18"], 4) == ["07", "18"]
    assert shorten_names(["golden retriever", "cat"], 6) == ["golde…", "cat"]
    assert shorten_names(["ab", "abcdef"], 4) == ["ab", "cdef"]


def test_matrix_lines_have_row_and_column_per_class() -> None:
    head, *rows = matrix_lines(["cat", "a dog", "owl"], BEST)
    assert head.split() == ["cat", "a", "dog", "owl"]
    assert [row[5:].split() for row in rows] == [["8", "2", "."], [".", "9", "1"], ["5", ".", "5"]]
    assert len({len(line) for line in (head, *rows)}) == 1


# Confusion screen


def test_confusion_screen_keys_choose_epoch_cell_and_order(demo_run: RunFolder) -> None:
    write_json(demo_run.evaluation, evaluation())

    def rows(pilot: Pilot[None]) -> list[str]:
        return [line[1:4] for line in visible_text(pilot, "#matrix").splitlines() if line[1:4] in ("cat", "dog", "owl")]

    async def act(pilot: Pilot[None], screen: ConfusionScreen) -> None:
        await drawn(pilot, "b")
        assert "last epoch 7" in visible_text(pilot, "#scores")
        assert "dog [bold] → owl 6 images 60%" in " ".join(visible_text(pilot, "#pairs").split())
        assert "no images" in visible_text(pilot, "#classes")
        await drawn(pilot, "b")
        assert "best epoch 3" in visible_text(pilot, "#scores")
        await drawn(pilot, "home")
        assert "cat predicted correctly: 8 of 10, 80%" in visible_text(pilot, "#matrix")
        await drawn(pilot, "right", "down", "down", "down")
        assert "owl predicted as dog [bold]: 0 of 10, 0%" in visible_text(pilot, "#matrix")
        await drawn(pilot, "tab", "down", "down", "enter")
        assert screen.query_one(Matrix).has_focus
        assert "dog [bold] predicted as owl: 1 of 10, 10%" in visible_text(pilot, "#matrix")
        assert rows(pilot) == ["cat", "dog", "owl"]
        await drawn(pilot, "o")
        assert rows(pilot) == ["owl", "cat", "dog"]

    drive_confusion(demo_run, act)


def test_confusion_screen_follows_file_and_reports_errors(demo_run: RunFolder) -> None:
    demo_run.evaluation.unlink()

    async def act(pilot: Pilot[None], screen: ConfusionScreen) -> None:
        assert "No evaluation yet" in visible_text(pilot, "#scores")
        write_json(demo_run.evaluation, evaluation(best=make_result(BEST, 4)))
        await wait_until(pilot, lambda: screen.evaluation_poller.value is not None)
        await drawn(pilot)
        assert "best epoch 4" in visible_text(pilot, "#scores")
        assert screen.query_one(Matrix).has_focus
        demo_run.evaluation.write_text('{"format": 1, "classes": 7}')
        await wait_until(pilot, lambda: screen.evaluation_poller.problem is not None)
        await drawn(pilot)
        assert says(visible_text(pilot, "#scores"), "damaged", "evaluation.json ", "$.classes: expected array")
        assert "owl" in visible_text(pilot, "#matrix")
        write_json(demo_run.evaluation, evaluation(best=make_result(BEST, 5)))
        await wait_until(pilot, lambda: screen.evaluation_poller.problem is None)
        await drawn(pilot)
        assert "best epoch 5" in visible_text(pilot, "#scores")

    drive_confusion(demo_run, act)


@pytest.mark.parametrize(
    ("task", "extra", "shown"),
    [
        ("multilabel", {"metrics": {"mAP": 0.5}, "details": {"F1": [0.1, 0.2, 0.3], "images": [7, 8, 9]}}, "mAP 0.5"),
        ("regression", {"metrics": {"mae": 2.5}, "points": [[[1, 2], [3, 4]]] * 3}, "mae 2.5"),
    ],
)
def test_confusion_screen_shows_outputs_of_other_tasks(
    demo_run: RunFolder, task: str, extra: dict[str, Any], shown: str
) -> None:
    result = make_result(BEST) | {"top1": None, "top5": None} | extra
    del result["confusion"]
    write_json(demo_run.evaluation, evaluation(task=task, best=result, last=result))

    async def act(pilot: Pilot[None], screen: ConfusionScreen) -> None:
        assert shown in visible_text(pilot, "#scores") and "top-1" not in visible_text(pilot, "#scores")
        assert not screen.query_one(Matrix).display
        assert screen.query_one("#scatter").display == ("points" in extra)
        listed = visible_text(pilot, "#classes")
        assert "owl" in listed and all(key in listed for key in extra.get("details", ()))
        await pilot.press("enter")
        assert isinstance(pilot.app.screen, ConfusionScreen)

    drive_confusion(demo_run, act)


def test_confusion_screen_with_1000_classes_shows_worst_first_and_reaches_all(demo_run: RunFolder) -> None:
    counts = np.diag(np.full(1000, 50))
    counts[700, 700], counts[700, 31] = 10, 40
    counts[123, 123], counts[123, 999] = 45, 5
    result = make_result(counts.tolist())
    content = evaluation(classes=[f"class-{n:03d}" for n in range(1000)], best=result, last=result)
    demo_run.evaluation.write_text(json.dumps(content))

    async def act(pilot: Pilot[None], screen: ConfusionScreen) -> None:
        first = [line for line in visible_text(pilot, "#matrix").splitlines() if "class-" in line[:8]]
        assert [line[1:10] for line in first[:2]] == ["class-700", "class-123"]
        assert "class-700 → class-031 40 images 80%" in " ".join(visible_text(pilot, "#pairs").split())
        await drawn(pilot, "end")
        assert "rows 9" in visible_text(pilot, "#matrix")
        assert screen.query_one(Matrix).pair == (999, 999)
        await drawn(pilot, "tab", "enter")
        assert "class-700 predicted as class-031: 40 of 50, 80%" in visible_text(pilot, "#matrix")

    drive_confusion(demo_run, act)


def test_confusion_screen_shows_all_rows_after_the_terminal_grows(demo_run: RunFolder) -> None:
    result = make_result(BEST) | {"top1": None, "top5": None, "points": [[[1, 2], [3, 4]]] * 3}
    del result["confusion"]
    write_json(demo_run.evaluation, evaluation(task="regression", best=result, last=result))

    async def act(pilot: Pilot[None], screen: ConfusionScreen) -> None:
        await pilot.resize_terminal(160, 48)
        # A header, and a row for each number.
        await wait_until(pilot, lambda: screen.query_one("#classes").size.height == 1 + len(NAMES))

    drive_confusion(demo_run, act, (80, 24))


def test_key_of_the_evaluation_has_the_name_of_the_outputs_of_the_task(demo_run: RunFolder) -> None:
    run = make_run_folder(demo_run.path.parent, "numbers", make_run_started(), make_epoch(1))
    run.config.write_text("task: {name: regression}\n")
    write_run_record(run)
    write_json(run.evaluation, evaluation(task="regression"))

    async def act(pilot: Pilot[None], _: ConfusionScreen) -> None:
        await pilot.press("escape")
        screen = pilot.app.screen
        assert isinstance(screen, RunScreen)
        titles = {key.key: screen.title_of(key) for key in screen.SCREEN_KEYS}
        assert titles["v"] == "numbers"

    drive_confusion(run, act)
