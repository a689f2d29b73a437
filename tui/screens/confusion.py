"""The evaluations of one run: which class was taken for which, the worst mistakes, and the accuracy of each class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container
from textual.widgets import Static

from engine.runs.folder import RunFolder
from engine.utils.text import counted, printable
from tui.keymap import CONFUSION, Command
from tui.pollers import EvaluationFeed
from tui.screens.base import AppServices, CockpitScreen
from tui.text.confusion import Evaluated, Evaluations, Mistake, cut, mistakes, percent, worst_first
from tui.text.palette import BAD, MUTED, STRONG
from tui.text.run_progress import bar
from tui.widgets.lines import Lines, Row
from tui.widgets.matrix import Matrix

# Of more classes than these the matrix does not show all at once on most screens, and the worst come first.
MANY_CLASSES = 30
LEAST_BAR, MOST_BAR, MOST_NAME = 5, 30, 16
SCROLL_BAR = 1
BETWEEN = " taken for "


class ConfusionScreen(CockpitScreen):
    COMMANDS_HERE: ClassVar[Sequence[Command]] = CONFUSION

    def __init__(self, app: AppServices, folder: RunFolder) -> None:
        super().__init__(app)
        self.folder = folder
        self.evaluation_feed = EvaluationFeed(folder.evaluation)
        self._shows_best = True
        self._worst_first: bool | None = None
        self._drawn: object = None

    def body(self) -> ComposeResult:
        yield Static("", id="scores", markup=False)
        with Container(id="confusion"):
            yield Matrix(id="matrix")
            with Container(id="worst"):
                pairs = Lines(choosing=True, id="pairs", empty=Text("no mistake", MUTED))
                pairs.border_title = "worst mistakes"
                yield pairs
                classes = Lines(choosing=True, id="classes")
                classes.border_title = "accuracy, worst first"
                yield classes

    def on_mount(self) -> None:
        self.query_one("#confusion").display = False
        self.evaluation_feed.start()

    def on_unmount(self) -> None:
        self.evaluation_feed.close()

    def tick(self) -> None:
        feed, name = self.evaluation_feed, printable(self.folder.name)
        self.show_title(f"{name}   which class was taken for which")
        found, problem = feed.now, feed.problem or feed.fault
        self.show_line("#scores", self._scores(found, problem, looked=feed.looked))
        panels = self.query_one("#confusion")
        if found is not None and not panels.display:
            # What is hidden cannot hold the focus.
            self.call_after_refresh(self.query_one(Matrix).focus)
        panels.display = found is not None
        # What is drawn hangs on these alone; the file is read again only where it has changed.
        now = (id(found), self._shows_best, self._worst_first, *(lines.size for lines in self.query(Lines)))
        if found is not None and now != self._drawn:
            self._drawn = now
            self._draw(found)

    def _scores(self, found: Evaluations | None, problem: str | None, *, looked: bool) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        if problem is not None:
            line.append(f" {printable(problem)}", BAD)
        elif found is None:
            line.append(" no evaluation yet: the first comes at the end of an epoch" if looked else " looking …", MUTED)
        else:
            shown = self._shown(found)
            which = "best" if self._shows_best else "last"
            line.append(f" {which} epoch {shown.epoch}", STRONG)
            line.append(f"   top-1 {shown.top1:.2%}   top-5 {shown.top5:.2%}")
            line.append("" if shown.loss is None else f"   loss {shown.loss:.4f}")
            line.append(f"   {shown.images:,} images")
        return line

    def _shown(self, found: Evaluations) -> Evaluated:
        return found.best if self._shows_best else found.last

    def _draw(self, found: Evaluations) -> None:
        shown = self._shown(found)
        names = [printable(name) for name in found.classes]
        worst = worst_first(shown.per_class)
        by_worst = len(names) > MANY_CLASSES if self._worst_first is None else self._worst_first
        matrix, pairs = self.query_one(Matrix), self.query_one("#pairs", Lines)
        kept = bool(shown.counts.size)
        matrix.display = pairs.display = kept
        if kept:
            found_mistakes = mistakes(shown.counts)
            begins = matrix.pair is None
            matrix.show(names, shown.counts, worst if by_worst else range(len(names)))
            if begins and found_mistakes and not by_worst:
                matrix.find(found_mistakes[0].true, found_mistakes[0].taken)
            lines = pair_lines(found_mistakes, names, pairs.size.width - SCROLL_BAR)
            keys = [f"{one.true} {one.taken}" for one in found_mistakes]
            pairs.show([Row(key, line) for key, line in zip(keys, lines, strict=True)])
        classes = self.query_one("#classes", Lines)
        images = shown.counts.sum(1).tolist() if kept else [None] * len(names)
        label, room = min(max(map(cell_len, names)), MOST_NAME), classes.size.width - SCROLL_BAR
        classes.show(
            [
                Row(
                    f"{number} {number}",
                    class_line(names[number], float(shown.per_class[number]), images[number], label, room),
                )
                for number in worst
            ]
        )

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        true, taken = map(int, event.key.split())
        matrix = self.query_one(Matrix)
        if matrix.display:
            matrix.find(true, taken)
            matrix.focus()

    def action_find(self) -> None:
        for lines in self.query(Lines):
            if lines.has_focus:
                lines.action_choose()

    def action_other_epoch(self) -> None:
        self._shows_best = not self._shows_best
        self.tick()

    def action_order(self) -> None:
        found = self.evaluation_feed.now
        if found is not None:
            many = len(found.classes) > MANY_CLASSES
            self._worst_first = not (many if self._worst_first is None else self._worst_first)
            self.tick()


def pair_lines(pairs: Sequence[Mistake], names: Sequence[str], width: int) -> list[Text]:
    """`4 taken for 9: 7 images, 12%`; all of them without that word where one would not find room."""
    tails = [f": {counted(one.images, 'image')}, {percent(one.share)}" for one in pairs]
    whole = [names[one.true] + BETWEEN + names[one.taken] + tail for one, tail in zip(pairs, tails, strict=True)]
    if max(map(cell_len, whole), default=0) > width:
        tails = [f": {one.images:,}, {percent(one.share)}" for one in pairs]
    return [pair_line(names[one.true], names[one.taken], tail, width) for one, tail in zip(pairs, tails, strict=True)]


def pair_line(true: str, taken: str, tail: str, width: int) -> Text:
    """The names are cut where there is no room for them."""
    room = max(width - len(BETWEEN) - len(tail), 2)
    if cell_len(true) + cell_len(taken) > room:
        longest = max(room // 2, room - min(cell_len(true), cell_len(taken)))
        true, taken = cut(true, longest), cut(taken, longest)
    return Text.assemble((true, STRONG), BETWEEN, (taken, STRONG), (tail, MUTED), no_wrap=True, end="")


def class_line(name: str, accuracy: float, images: int | None, label: int, width: int) -> Text:
    """Name, a bar, the accuracy, and of how many images."""
    line = Text(no_wrap=True, end="")
    name = cut(name, label)
    line.append(name + " " * (label - cell_len(name) + 1), STRONG)
    if math.isnan(accuracy):
        line.append("no image", MUTED)
        return line
    tail = f" {accuracy:6.1%}" + ("" if images is None else f" of {images:,}")
    room = min(width - line.cell_len - len(tail), MOST_BAR)
    if room >= LEAST_BAR:
        line.append_text(bar(accuracy, room))
    line.append(tail)
    return line
