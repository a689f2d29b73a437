"""The confusion screen: confusion matrix, worst mistakes and per-class accuracy of a run's best or last epoch.

`tui.screens.pollers.files` reads the evaluations; `tui.screens.widgets.matrix` draws the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container

from engine.base.errors import Problem
from engine.base.text import printable
from engine.base.units import format_count, format_score
from engine.config.tasks import TASK_FACTS, per_output_mode
from engine.report.classes import ClassRow, class_columns, class_rows
from engine.report.table import fit
from engine.runs.evaluations import EvaluationFile, StoredEvaluation, finite_points, mistakes, worst_first
from engine.runs.folder import RunFolder
from tui.screens.base import GputrainScreen
from tui.screens.keymap import CONFUSION_KEYS, Key
from tui.screens.pollers.files import watch_evaluations
from tui.screens.services import AppServices
from tui.screens.tables import styled
from tui.screens.tables.confusion import (
    class_line,
    class_table,
    mistake_table,
    scatter_lines,
)
from tui.screens.widgets.lines import KeyedRow, LazyRows, Lines
from tui.screens.widgets.matrix import Matrix
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import BAD, MUTED, STRONG

# With more classes than this, the matrix does not fit most terminals, so the worst classes come first by default.
MAX_UNSORTED_CLASSES = 30
MIN_PLOT_ROWS, SCROLLBAR_COLUMNS = 10, 2


class ConfusionScreen(GputrainScreen):
    """Scores, confusion matrix, worst mistakes and per-class accuracy of one epoch."""

    CSS_PATH = "confusion.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = CONFUSION_KEYS

    def __init__(self, app: AppServices, folder: RunFolder) -> None:
        super().__init__(app)
        self.folder = folder
        self.evaluation_poller = self.follow(watch_evaluations(folder))
        self._show_best = True
        self._sort_worst_first: bool | None = None
        self._drawn_key: object = None

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="scores")
        with Container(id="confusion"):
            yield Matrix(id="matrix")
            yield Lines(id="scatter", title="Predicted (upwards) against true (to the right)", selectable=True)
            with Container(id="rankings"):
                no_mistakes, title = Text("No mistakes", MUTED), "Mistakes, worst first"
                yield Lines(id="pairs", title=title, selectable=True, empty_text=no_mistakes)
                yield Lines(id="classes", title="Accuracy, worst first", selectable=True)

    def on_mount(self) -> None:
        self.query_one("#confusion").display = False

    def update_content(self) -> None:
        poller, name = self.evaluation_poller, printable(self.folder.name)
        evaluations, problem = poller.value, poller.problem
        facts = TASK_FACTS["classification" if evaluations is None else evaluations.task]
        self.show_title(f"{name}   {'confusion matrix' if facts.ranked else facts.outputs}")
        self.show_line("#scores", self._scores_line(evaluations, problem, has_polled=poller.has_polled))
        panels = self.query_one("#confusion")
        if evaluations is not None and not panels.display:
            # A hidden widget cannot take the focus, so wait until the panels are displayed.
            self.call_after_refresh(self.query_one(Matrix).focus)
        panels.display = evaluations is not None
        # The poller returns a new object only when the file has changed, so its id is part of the key.
        sizes = [lines.size for lines in self.query(Lines)]
        drawn_key = (id(evaluations), self._show_best, self._sort_worst_first, *sizes)
        if evaluations is not None and drawn_key != self._drawn_key:
            self._drawn_key = drawn_key
            self._draw_evaluation(evaluations)

    def _scores_line(self, evaluations: EvaluationFile | None, problem: Problem | None, *, has_polled: bool) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        if problem is not None:
            line.append(f" {printable(str(problem))}", BAD)
        elif evaluations is None:
            line.append(
                " No evaluation yet; the first follows at the end of an epoch" if has_polled else " Loading …", MUTED
            )
        else:
            evaluation = self._selected_evaluation(evaluations)
            epoch_label = "best" if self._show_best else "last"
            line.append(f" {epoch_label} epoch {evaluation.epoch}", STRONG)
            if evaluation.top1 is not None:
                line.append(f"   top-1 {format_score(evaluation.top1)}   top-5 {format_score(evaluation.top5)}")
            for key in TASK_FACTS[evaluations.task].metrics:
                line.append(f"   {key} {format_score(evaluation.metrics[key])}" if key in evaluation.metrics else "")
            line.append("" if evaluation.loss is None else f"   loss {format_score(evaluation.loss)}")
            line.append(f"   {format_count(evaluation.images)} images")
        return line

    def _selected_evaluation(self, evaluations: EvaluationFile) -> StoredEvaluation:
        return evaluations.best if self._show_best else evaluations.last

    def _is_worst_first(self, evaluations: EvaluationFile) -> bool:
        by_default = len(evaluations.classes) > MAX_UNSORTED_CLASSES
        return by_default if self._sort_worst_first is None else self._sort_worst_first

    def _draw_evaluation(self, evaluations: EvaluationFile) -> None:
        evaluation = self._selected_evaluation(evaluations)
        names = [printable(name) for name in evaluations.classes]
        counts, accuracies = evaluation.read_counts(), evaluation.accuracies()
        facts = TASK_FACTS[evaluations.task]
        worst = worst_first(accuracies, per_output_mode(facts))
        by_worst = self._is_worst_first(evaluations)
        matrix, pairs = self.query_one(Matrix), self.query_one("#pairs", Lines)
        has_matrix = bool(counts.size)
        matrix.display = pairs.display = has_matrix
        if has_matrix:
            worst_mistakes = mistakes(counts)
            is_first_draw = matrix.pair is None
            matrix.set_data(names, counts, worst if by_worst else range(len(names)))
            if is_first_draw and worst_mistakes and not by_worst:
                matrix.select_pair(worst_mistakes[0].true_class, worst_mistakes[0].predicted_class)
            pair_table = mistake_table(worst_mistakes, names, pairs.text_width)
            keys = [f"{mistake.true_class} {mistake.predicted_class}" for mistake in worst_mistakes]
            pairs.set_rows(LazyRows(keys, lambda index: styled(pair_table.line(worst_mistakes[index]))))
        self._draw_scatter(evaluations, evaluation)
        classes = self.query_one("#classes", Lines)
        if not facts.ranked:
            classes.border_title = f"{facts.outputs.capitalize()}, worst first"
            ordered = class_rows(names, evaluation.per_class, evaluation.details)
            columns = class_columns(evaluations.task, evaluation.details)
            fitted = fit(columns, ordered, classes.text_width)
            lines = [KeyedRow(str(number), styled(fitted.line(ordered[number]))) for number in worst]
            classes.set_rows(lines, [styled(fitted.header(MUTED))])
            return
        images = counts.sum(1).tolist() if has_matrix else [None] * len(names)
        rows = [ClassRow(names[number], float(accuracies[number]), images[number]) for number in worst]
        table = class_table(rows, classes.text_width)
        keys = [f"{number} {number}" for number in worst]
        classes.set_rows(LazyRows(keys, lambda index: class_line(table, rows[index])))

    def _draw_scatter(self, evaluations: EvaluationFile, evaluation: StoredEvaluation) -> None:
        """Draw the predicted against the true numbers of a regression, one plot below the other."""
        scatter = self.query_one("#scatter", Lines)
        scatter.display = bool(evaluation.points)
        rows = max((scatter.size.height or self.size.height) - 1, MIN_PLOT_ROWS)
        lines = list[str]()
        for name, pairs in zip(evaluations.classes, evaluation.points, strict=False):
            points = finite_points(pairs)
            if len(points):
                ends = f"{format_score(float(points.min()))} to {format_score(float(points.max()))}"
                lines.append(f"{printable(name)}, {ends}")
                lines += scatter_lines(points, max(scatter.text_width - SCROLLBAR_COLUMNS, MIN_PLOT_ROWS), rows)
        scatter.set_texts([Text(line, no_wrap=True, end="") for line in lines])

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        event.prevent_default()
        matrix = self.query_one(Matrix)
        if matrix.display:
            true, predicted = map(int, event.key.split())
            matrix.select_pair(true, predicted)
            matrix.focus()
        else:
            self.action_open()

    def action_open(self) -> None:
        """Show the images of the cell under the cursor, or select the row of a list in the matrix."""
        matrix = self.query_one(Matrix)
        for lines in self.query(Lines):
            if lines.has_focus and matrix.display:
                lines.action_choose()
                return
        evaluations = self.evaluation_poller.value
        if evaluations is not None and not TASK_FACTS[evaluations.task].ranked:
            outputs = TASK_FACTS[evaluations.task].outputs
            reason = f"No images by class: task {evaluations.task} has {outputs}; run `gputrain evaluate "
            command = f"{printable(self.folder.name)} --list mistakes`"
            self.gputrain_app.show_toast(Problem("", reason + command, code="not-supported"))
        elif evaluations is not None:
            from tui.screens.mistakes import EpochName, MistakesScreen

            epoch = self._selected_evaluation(evaluations).epoch
            cell = matrix.pair if matrix.display else None
            name: EpochName = "best" if self._show_best else "last"
            self.app.push_screen(MistakesScreen(self.gputrain_app, self.folder, (name, epoch), cell))

    def title_of(self, key: Key) -> str:
        """Return `find` in a list: enter selects its row in the matrix."""
        in_list = any(lines.has_focus for lines in self.query(Lines)) and self.query_one(Matrix).display
        title = "find" if in_list else "images"
        return title if key.action == "open" else super().title_of(key)

    def action_other_epoch(self) -> None:
        self._show_best = not self._show_best
        self.update_content()

    def action_sort(self) -> None:
        evaluations = self.evaluation_poller.value
        if evaluations is not None:
            self._sort_worst_first = not self._is_worst_first(evaluations)
            self.update_content()
