"""The base class of all screens: title line, footer, optional filter, and a notice when the terminal is too small."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.reactive import Reactive
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Input, Static

from engine.base.errors import UsageError
from engine.runs.folder import RunFolder
from tui.screens.keymap import BACK_KEY, FILTER_KEYS, GLOBAL_KEYS, Ability, Key, make_bindings
from tui.screens.pollers.watched import Poller
from tui.screens.services import AppServices
from tui.screens.widgets.entry import TextEntry
from tui.screens.widgets.keys import Keys
from tui.screens.widgets.lines import Lines, escape_markup
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import ACCENT, NOTICE

if TYPE_CHECKING:
    pass

MIN_COLUMNS, MIN_ROWS = 60, 15
# The sentence of a problem is longer than that of a success.
PROBLEM_SECONDS = 10.0


class Filter(TextEntry):
    """A one-line filter, hidden until it is activated. Enter keeps the text and returns the focus; escape also clears
    and hides the line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", show=False)]

    def __init__(self, id: str = "filter", placeholder: str = "Type to filter; enter keeps it, esc clears it") -> None:  # noqa: A002
        super().__init__(id=id, placeholder=placeholder)
        self.display = False
        self._previous_focus: Widget | None = None

    def activate(self) -> None:
        """Show and focus the filter."""
        if not self.has_focus:
            self._previous_focus = self.screen.focused
        self.display = True
        # At once, unlike `focus`, so that the next key is typed into the filter.
        self.screen.set_focus(self)

    def action_dismiss(self) -> None:
        self.value = ""
        self.display = False
        self.restore_focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.restore_focus()

    def restore_focus(self) -> None:
        """Focus the previously focused widget if it is still visible, else the next one."""
        previous = self._previous_focus
        if previous is not None and previous.is_attached and previous.region:
            previous.focus()
        else:
            self.screen.focus_next()


Result = TypeVar("Result")
Outcome = TypeVar("Outcome")
AnyPoller = TypeVar("AnyPoller", bound=Poller)


def is_too_small(size: Size) -> bool:
    """Whether a terminal of this size shows a notice in place of the screens, which take no keys then."""
    return size.width < MIN_COLUMNS or size.height < MIN_ROWS


class ResizableScreen(Screen[Result], Generic[Result]):
    """A screen whose layout settles, however fast the terminal is resized, and that is hidden while the terminal is
    too small. It gets its focus back when it is shown again."""

    FITS_ANY_SIZE: ClassVar[bool] = False
    """Whether the screen is shown, and takes keys, however small the terminal is."""

    _hidden_focus: Widget | None = None

    async def on_event(self, event: events.Event) -> None:
        # A layout of a new size makes Textual send the screen a `Resize` of that size. While two sizes wait, each
        # layout would send its own again behind the other, without end. The app knows the current one.
        if not isinstance(event, events.Resize) or event.size == self.app.size:
            await super().on_event(event)

    @on(events.TextSelected)
    def _copy_selection(self) -> None:
        if text := self.get_selected_text():
            self.app.copy_to_clipboard(text)

    @on(events.Resize)
    def _hide_if_too_small(self, event: events.Resize) -> None:
        hides, was_hidden = is_too_small(event.size) and not self.FITS_ANY_SIZE, self.has_class("-too-small")
        if hides and not was_hidden:
            self._hidden_focus = self.focused
        elif was_hidden and not hides and self._hidden_focus is not None:
            self.call_after_refresh(self.set_focus, self._hidden_focus)
        self.set_class(hides, "-too-small")


class Dialog(ModalScreen[Result | None], ResizableScreen[Result | None], Generic[Result]):
    """Base class of the dialogs: a box with a title and a hint on its keys. Returns a result to the screen below, None
    if it is left."""

    # A dialog is modal: the keys of the app do not reach it.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("q", "app.quit", show=False),
    ]
    HINT: ClassVar[str]
    BOX_CLASSES: ClassVar[str] = "dialog"

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self.opened_at = time.monotonic()

    def compose(self) -> ComposeResult:
        with Vertical(classes=self.BOX_CLASSES) as box:
            box.border_title = escape_markup(self._title)
            yield from self.compose_box()
            yield Static(self.HINT, classes="hint", markup=False)

    def compose_box(self) -> ComposeResult:
        """Yield what is between the title and the hint."""
        raise NotImplementedError

    def action_leave(self) -> None:
        self.dismiss(None)

    @property
    def has_content(self) -> bool:
        """Whether the dialog takes keys. Before, they wait for it for a moment."""
        return self.focused is not None


def watch_other_hosts(app: AppServices, folders: Sequence[RunFolder]) -> None:
    """Watch the heartbeats of runs that other hosts claim before they are taken over, and say so. Runs in a thread."""
    from engine.runs.claim import uncertain_claims, watch_claims

    owners = [folder.owner for folder in folders]
    if waits := uncertain_claims(owners):
        watching = f"Watching heartbeats for up to {max(waits.values()):g} s"
        app.call_from_thread(app.show_toast, watching)
        watch_claims(owners)


class GputrainScreen(ResizableScreen[None]):
    """Base class of all screens.

    A subclass sets `SCREEN_KEYS` and implements `compose_body` and `update_content`. `update_content` runs when the
    screen appears and once per poll interval while it is on top.
    """

    # Instead of Textual's, which know no panels that take turns.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "next_panel(1)", show=False),
        Binding("shift+tab", "next_panel(-1)", show=False),
    ]
    SCREEN_KEYS: ClassVar[Sequence[Key]] = ()
    SHARED_KEYS: ClassVar[Sequence[Key]] = GLOBAL_KEYS
    shows_runs: bool = False
    """Whether it shows the runs of the runs folder."""
    SHOWN_READINGS: ClassVar[Sequence[str]] = ()
    """Keys of the readings whose meanings are in the help of the screen."""
    # Textual repaints the whole screen when the focus moves, although both widgets repaint themselves.
    focused: Reactive[Widget | None] = Reactive(None, repaint=False)

    def __init__(self, app: AppServices, abilities: Ability = Ability.ALL) -> None:
        """`abilities` are those of the runs that the screen shows. It lacks the keys of the others."""
        super().__init__()
        self.gputrain_app, self.abilities = app, abilities
        self.screen_keys = [key for key in self.SCREEN_KEYS if key.needs in abilities]
        self._filter: Filter | None = None
        self.pollers: list[Poller] = []
        """The pollers of this screen alone."""
        self.opened_at = self._updated_at = time.monotonic()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]
        for binding in make_bindings([*self.screen_keys, BACK_KEY]):
            self.add_binding(binding)

    @property
    def key_table(self) -> list[Key]:
        """All keys that work on the screen, except in its lists."""
        return [*self.screen_keys, *self.SHARED_KEYS]

    def follow(self, poller: AnyPoller) -> AnyPoller:
        """Run a poller of this screen from when it is mounted until it is left, and show its first result at once."""
        poller.on_first_result = self._show_first_result
        self.pollers.append(poller)
        if self.is_mounted:
            poller.start()
        return poller

    def _show_first_result(self) -> None:
        """Update the screen without waiting for its refresh interval. Called in the thread of a poller."""
        self.call_later(self.update_if_on_top)

    def act(
        self,
        work: Callable[[], Outcome],
        done: Callable[[Outcome], object] = lambda _: None,
        failed: Callable[[], object] = lambda: None,
        *,
        in_thread: bool = False,
        is_awaited: bool = True,
    ) -> None:
        """Do `work`, and call `done` with its result. A UsageError is shown as a toast, and `failed` is called instead.

        Work that may take longer than a frame runs `in_thread`; the end of the screen waits for it if it `is_awaited`.
        All else happens in the event loop, and so does short work: requests that follow each other must keep their
        order."""
        app = self.app

        def run() -> Callable[[], object]:
            try:
                return partial(done, work())
            except UsageError as error:
                return partial(self._refuse, error, failed)

        def report_late() -> None:
            outcome = run()
            if app.is_running:
                app.call_from_thread(outcome)

        if in_thread and is_awaited:
            self.run_worker(lambda: app.call_from_thread(run()), thread=True, group="act")
        elif in_thread:
            threading.Thread(target=report_late, daemon=True).start()
        else:
            run()()

    def _refuse(self, error: UsageError, failed: Callable[[], object]) -> None:
        self.gputrain_app.show_toast(error, timeout_s=PROBLEM_SECONDS)
        failed()

    def add_binding(self, binding: Binding) -> None:
        """Bind the keys of one row of the table on this instance."""
        for key in binding.key.split(","):
            # With priority, the letters that follow at once are typed into the filter, not handled by the list.
            self._bindings.bind(
                key, binding.action, binding.description, show=False, priority=binding.action == "filter"
            )

    def compose(self) -> ComposeResult:
        yield TextLine(id="title")
        yield from self.compose_body()
        if any(key.action == "filter" for key in self.screen_keys):
            self._filter = self.make_filter()
            yield self._filter
        yield Keys()
        yield Static(
            f"The terminal is too small: gputrain needs {MIN_COLUMNS} columns and {MIN_ROWS} lines. "
            "Enlarge it, press ? for help, or q to quit; runs continue.",
            id="too-small",
        )

    def compose_body(self) -> ComposeResult:
        raise NotImplementedError

    @property
    def has_content(self) -> bool:
        """Whether the screen shows what keys act on. Before, they wait for it for a moment."""
        return True

    def make_filter(self) -> Filter:
        """Return the filter of a screen that has the key for it."""
        return Filter()

    def is_available(self, action: str) -> bool:
        """Whether an action has an effect in the current state; the footer hides the others."""
        return True

    def title_of(self, key: Key) -> str:
        """Return the footer title of a key in the current state, such as `continue` instead of `pause`."""
        return "clear filter" if key is BACK_KEY and self.has_open_filter else key.title

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        self.update_keys()

    def update_keys(self) -> None:
        """Update the footer after a change of the focus or of the state."""
        titles = [
            (key, self.title_of(key)) for key in self.key_table if key.rank < math.inf and self.is_available(key.action)
        ]
        is_typing = isinstance(self.focused, Filter)
        self.query_one(Keys).show([(key, key.title) for key in FILTER_KEYS] if is_typing else titles)

    def on_mount(self) -> None:
        # Textual calls `on_mount` of each class, that of the subclass first.
        for poller in self.pollers:
            poller.start()
        self.set_interval(self.gputrain_app.intervals.poll_s, self._refresh)
        # The first results arrive well before the first interval ends.
        for seconds in (0.1, 0.3, 0.6):
            self.set_timer(seconds, self.update_if_on_top)

    def on_unmount(self) -> None:
        for poller in self.pollers:
            poller.close()

    def on_screen_resume(self) -> None:
        self.gputrain_app.run_list_poller.enabled = self.shows_runs
        # After the refresh, another screen may already be on top.
        self.call_after_refresh(self.update_if_on_top)

    def _refresh(self) -> None:
        # Timers are late or early by some milliseconds.
        interval = self.gputrain_app.refresh_s - 0.5 * self.gputrain_app.intervals.poll_s
        if self.is_topmost and time.monotonic() - self._updated_at > interval:
            self.update_if_on_top()

    def update_if_on_top(self) -> None:
        """Update the content, unless another screen covers it."""
        self._updated_at = time.monotonic()
        # What became of a start may be known before its screen has widgets.
        if self.children and self.is_on_top:
            self.update_content()
            self.update_keys()

    @property
    def is_on_top(self) -> bool:
        """Whether no screen covers this one, except a dialog."""
        for screen in reversed(self.app.screen_stack):
            if screen is self:
                return True
            if not isinstance(screen, ModalScreen):
                break
        return False

    @property
    def is_topmost(self) -> bool:
        """Whether it shows what is new. It stands still below a dialog: Textual would draw all of it again, dimmed."""
        return self.app.screen is self

    def update_content(self) -> None:
        """Show the latest results of the pollers."""

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.update_if_on_top)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Let the key of the filter be typed into an input."""
        return action != "filter" or not isinstance(self.focused, Input)

    def show_title(self, name: str, details: str = "", right: str = "") -> None:
        """Show the name of what is shown, then `details`, then the notice on simulated or recorded data if
        any, and `right` at the right edge."""
        line = Text(no_wrap=True, end="", overflow="ellipsis")
        line.append(" gputrain ", ACCENT)
        notice = self.gputrain_app.source_notice()
        left_text = Text(f" {name}   {details}" if details else f" {name}", no_wrap=True)
        # The notice must never be cut off, so the text is truncated instead.
        left_text.truncate(
            max(self.size.width - line.cell_len - len(f"   {notice} " if notice else ""), 0), overflow="ellipsis"
        )
        line.append_text(left_text)
        if notice is not None:
            line.append("  ")
            line.append(f" {notice} ", NOTICE)
        room = self.size.width - line.cell_len - len(right) - 1
        if right and room > 0:
            line.append(" " * room + right)
        self.show_line("#title", line)

    def show_line(self, selector: str, line: Text) -> None:
        """Show the text in a `TextLine`."""
        self.query_one(selector, TextLine).show(line)

    @property
    def filter_text(self) -> str:
        """The filter in lower case; empty without a filter."""
        return "" if self._filter is None else self._filter.value.strip().lower()

    @property
    def has_open_filter(self) -> bool:
        """Whether the filter is shown, which is the level that `back` leaves first."""
        return self._filter is not None and self._filter.display

    def action_filter(self) -> None:
        self.query_one(Filter).activate()

    def action_open(self) -> None:
        """Open what is under the cursor, if that can be opened."""

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.action_open()

    def action_next_panel(self, step: int) -> None:
        """Focus the panel `step` places after the focused one, 1 or -1."""
        self.focus_next() if step > 0 else self.focus_previous()

    async def action_back(self) -> None:
        """Go one level back: close the filter if it is open, else return to the previous screen."""
        if self.has_open_filter:
            self.query_one(Filter).action_dismiss()
        else:
            await self.gputrain_app.action_back()

    @on(Input.Changed, "#filter")
    def _apply_filter(self) -> None:
        self.update_content()
