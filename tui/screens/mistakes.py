"""The screen of the mistakes: lists of images of one evaluation, and a preview of the image under the cursor.

`tui.screens.pollers.files` reads the lists that `gputrain evaluate --list` stores, `tui.screens.widgets.picture` shows
one image.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container

from engine.base.errors import Problem
from engine.base.text import printable
from engine.report.table import fit
from engine.runs.folder import RunFolder
from engine.runs.inspection import InspectedImage
from engine.train.inference.preview import load_preview
from tui.screens.base import GputrainScreen
from tui.screens.keymap import MISTAKES_KEYS, Key
from tui.screens.pollers.files import LIST_KEYS, MAX_LISTED, InspectionLists, watch_inspection
from tui.screens.services import AppServices
from tui.screens.tables import styled
from tui.screens.tables.confusion import ARROW
from tui.screens.tables.mistakes import LIST_TITLES, ListKey, fact_lines, image_columns, image_path
from tui.screens.widgets.lines import LazyRows, Lines, escape_markup
from tui.screens.widgets.picture import PicturePanel
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import ACCENT, BAD, MUTED, STRONG, WARNING

EpochName = Literal["best", "last"]
MAX_MEASURED = 100


class MistakesScreen(GputrainScreen):
    """Images of a cell of the confusion matrix, and the lists of confident mistakes, uncertain images and labels."""

    CSS_PATH = "mistakes.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = MISTAKES_KEYS

    def __init__(
        self,
        app: AppServices,
        folder: RunFolder,
        epoch: tuple[EpochName, int],
        cell: tuple[int, int] | None,
    ) -> None:
        """Show the evaluation of this epoch, the best or the last one, and this cell: true and predicted class."""
        super().__init__(app)
        self.folder = folder
        self._epoch, self._cell = epoch, cell
        self.inspection_poller = self.follow(watch_inspection(folder, cell))
        # Without a matrix, no cell was chosen.
        self._keys = LIST_KEYS if cell is not None else LIST_KEYS[1:]
        self._key: ListKey = self._keys[0]

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="inspected")
        yield TextLine(id="list-tabs")
        with Container(id="mistakes"):
            yield Lines(selectable=True, id="images", empty_text=Text(""))
            with Container(id="picture-panel"):
                yield PicturePanel(id="picture")
                yield Lines(id="facts", focusable=False)

    def on_mount(self) -> None:
        self.query_one("#mistakes").display = False

    @property
    def has_content(self) -> bool:
        return self.inspection_poller.has_polled

    def update_content(self) -> None:
        self.show_title(f"{printable(self.folder.name)}   mistakes")
        lists, panels = self.inspection_poller.value, self.query_one("#mistakes")
        self.show_line("#inspected", Text.assemble(" ", *self._status(lists), no_wrap=True, overflow="ellipsis"))
        if lists is None:
            panels.display = False
            self.show_line("#list-tabs", Text())
            return
        if not panels.display:
            panels.display = True
            # A hidden widget cannot take the focus, so wait until the panels are displayed.
            self.call_after_refresh(self.query_one("#images").focus)
        line = Text(" ", no_wrap=True, overflow="ellipsis", end="")
        for key in self._keys:
            title = self._list_title(lists, key, is_wide=self.size.width >= 100)
            line.append(f" {title} ", ACCENT if key == self._key else MUTED).append("  ")
        self.show_line("#list-tabs", line)
        self._draw_list(lists)

    def _status(self, lists: InspectionLists | None) -> list[tuple[str, str]]:
        """Return what is shown, whether it belongs to the evaluation, or how to make it."""
        poller = self.inspection_poller
        # A narrow terminal cuts the end of the line: the command is before what is known anyway.
        advice = (f"; run `gputrain evaluate {printable(self.folder.name)} --list mistakes`", MUTED)
        if (problem := poller.problem) is not None:
            return [(printable(str(problem)), BAD), advice]
        if lists is None and not poller.has_polled:
            return [("Loading …", MUTED)]
        if lists is None:
            return [("No results of single images", STRONG), advice]
        info = lists.inspection.info
        parts = [(printable(info.checkpoint), STRONG), (f"   {len(lists.inspection):,} images", "")]
        parts.append((time.strftime("   evaluated %Y-%m-%d %H:%M", time.localtime(info.time)), ""))
        if (reason := info.stale_reason((self._epoch[1],))) is not None:
            return [("Evaluation ", ""), (printable(reason), WARNING), advice, ("   ", ""), *parts]
        return parts

    def _list_title(self, lists: InspectionLists, key: ListKey, is_wide: bool = True) -> str:
        classes = lists.inspection.info.classes
        if key == "cell" and self._cell is not None and max(self._cell) < len(classes):
            return ARROW.join(printable(classes[number]) for number in self._cell)
        return LIST_TITLES[key][0 if is_wide else 1]

    def _draw_list(self, lists: InspectionLists) -> None:
        images, inspection = self.query_one("#images", Lines), lists.inspection
        rows, is_cell = lists.rows[self._key], self._key == "cell"
        title = self._list_title(lists, self._key)
        shown = f"{len(rows):,}" if len(rows) < MAX_LISTED else f"first {MAX_LISTED:,}"
        images.set_titles(escape_markup(f"{title}, greatest loss first" if is_cell else title.capitalize()), shown)
        # The first rows decide the widths. The others are not read before they are visible.
        columns, measured = image_columns(self._key, inspection.info.classes), inspection.images(rows[:MAX_MEASURED])
        table = fit(columns, measured, images.text_width)
        keys = [str(row) for row in rows]
        listed = LazyRows(keys, lambda index: styled(table.line(inspection.image(int(rows[index])))))
        empty = "No image of this cell was evaluated" if is_cell else "No mistakes"
        images.set_rows(listed, [styled(table.header(MUTED))] if keys else [], Text(empty, MUTED))
        self._show_image()

    def selected_image(self) -> InspectedImage | None:
        """Return the image under the cursor."""
        lists, key = self.inspection_poller.value, self.query_one("#images", Lines).selected_key
        if lists is None or key is None or int(key) >= len(lists.inspection):
            return None
        return lists.inspection.image(int(key))

    def _show_image(self) -> None:
        lists, image = self.inspection_poller.value, self.selected_image()
        picture, facts = self.query_one(PicturePanel), self.query_one("#facts", Lines)
        panel = self.query_one("#picture-panel")
        if lists is None or image is None:
            panel.border_title = None
            picture.show_nothing()
            facts.set_texts([])
            return
        inspection = lists.inspection
        panel.border_title = escape_markup(printable(image.name.rpartition("/")[2]))
        facts.set_texts(fact_lines(image, inspection.info, facts.text_width))
        key = (inspection.info.digest, inspection.info.time, image.row)
        picture.show(key, partial(load_preview, self.folder, inspection, image))

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self._show_image()

    def is_available(self, action: str) -> bool:
        name = action.partition("(")[0]
        if name in ("sideways", "copy"):
            return self.inspection_poller.value is not None
        return super().is_available(action)

    def action_next_panel(self, step: int) -> None:
        """Show another list: they take turns in one panel."""
        self.action_sideways(step)

    def action_sideways(self, step: int) -> None:
        if self.inspection_poller.value is not None:
            self._key = self._keys[(self._keys.index(self._key) + step) % len(self._keys)]
            self.update_content()
            self.query_one("#images", Lines).action_move(-MAX_LISTED)

    def action_copy(self) -> None:
        lists, image = self.inspection_poller.value, self.selected_image()
        if lists is None or image is None:
            self.gputrain_app.show_toast(Problem("", "No image is selected", code="not-selected"))
        elif (path := image_path(image, lists.inspection.info)) is None:
            self.gputrain_app.show_toast(Problem("", "This dataset has no image files", code="no-images"))
        else:
            self.gputrain_app.copy_to_clipboard(path, f"Copied {path}")
