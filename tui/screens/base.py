"""What all screens have: a title, the keys at the foot, a filter where there is something to filter, and a sentence
instead of all that where the terminal is too small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input, Static

from engine.runs.folder import RunFolder, RunState
from tui.keymap import GLOBAL_COMMANDS, Command, make_bindings
from tui.launcher import LaunchedRun
from tui.pollers import GpuPoller, RefreshIntervals, RunListPoller
from tui.text.palette import NOTICE, STRONG
from tui.widgets.entry import Entry
from tui.widgets.keys import Keys

MIN_COLUMNS, MIN_ROWS = 60, 15


class Filter(Entry):
    """One line, shown while it is used. Enter goes back to what is filtered, escape empties and hides it as well."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", show=False)]

    def __init__(self, id: str = "filter", placeholder: str = "type to filter, enter keeps it, esc ends it") -> None:  # noqa: A002
        super().__init__(id=id, placeholder=placeholder)
        self.display = False
        self._previous_focus: Widget | None = None

    def activate(self) -> None:
        if not self.has_focus:
            self._previous_focus = self.screen.focused
        self.display = True
        self.focus()

    def action_dismiss(self) -> None:
        self.value = ""
        self.display = False
        self.restore_focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.restore_focus()

    def restore_focus(self) -> None:
        """To what had the focus before, where that is still shown."""
        came_from = self._previous_focus
        if came_from is not None and came_from.is_attached and came_from.region:
            came_from.focus()
        else:
            self.screen.focus_next()


class AppServices(Protocol):
    """What screens need of the app: its settings, what its pollers found, and the way to other screens."""

    runs_dir: Path
    demo_notice: str | None
    """Shown on every screen of a demonstration, in which nothing is started; None outside of one."""
    intervals: RefreshIntervals
    gpu_poller: GpuPoller
    run_list_poller: RunListPoller
    picked_gpu_uuids: set[str]
    """GPUs for the next run."""
    pending_run: LaunchedRun | None
    """A run that was started here and has not begun."""

    def source_notice(self) -> str | None: ...

    def show_toast(self, message: str, *, warning: bool = False, timeout_s: float = 5.0) -> None: ...

    def open_run(self, folder: str) -> None: ...

    def open_form(self, run_config: Path | None = None) -> None: ...

    def launch(self, arguments: Sequence[str], runs_dir: Path | None = None) -> None: ...

    def resume_run(self, folder: RunFolder, state: RunState | None) -> None: ...

    def switch_to_run(self, folder: RunFolder) -> None: ...

    async def action_back(self) -> None: ...


class GputrainScreen(Screen[None]):
    """`SCREEN_COMMANDS` are its own; `update_content` is called while it is shown, once a period and when it comes
    up."""

    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = ()
    SHARED_COMMANDS: ClassVar[Sequence[Command]] = GLOBAL_COMMANDS
    SHOWS_RUNS: ClassVar[bool] = False
    COMMAND_TABLE: ClassVar[Sequence[Command]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.COMMAND_TABLE = (*cls.SCREEN_COMMANDS, *cls.SHARED_COMMANDS)

    def __init__(self, app: AppServices) -> None:
        super().__init__()
        self.gputrain_app = app
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]
        for binding in make_bindings(self.SCREEN_COMMANDS):
            self.add_binding(binding)

    def add_binding(self, binding: Binding) -> None:
        for key in binding.key.split(","):
            self._bindings.bind(key, binding.action, binding.description, show=False)

    def compose(self) -> ComposeResult:
        yield Static("", id="title", markup=False)
        yield from self.compose_body()
        if any(command.action == "filter" for command in self.SCREEN_COMMANDS):
            yield Filter()
        yield Keys(self.COMMAND_TABLE)
        yield Static(
            f"This terminal is too small: gputrain needs {MIN_COLUMNS} columns and {MIN_ROWS} lines. "
            "Make it larger, or press q to leave; runs go on.",
            id="too-small",
        )

    def compose_body(self) -> ComposeResult:
        raise NotImplementedError

    def on_mount(self) -> None:
        self.set_interval(self.gputrain_app.intervals.poll_s, self._update_if_on_top)
        # What comes first need not wait for the first of those.
        for seconds in (0.1, 0.3, 0.6):
            self.set_timer(seconds, self._update_if_on_top)

    def on_screen_resume(self) -> None:
        self.gputrain_app.run_list_poller.enabled = self.SHOWS_RUNS
        # By then it may have been left again.
        self.call_after_refresh(self._update_if_on_top)

    def _update_if_on_top(self) -> None:
        if self.is_on_top:
            self.update_content()

    @property
    def is_on_top(self) -> bool:
        """Textual's `is_current` holds for the screen below, too, which would then be drawn for nobody."""
        return self.app.screen_stack[-1:] == [self]

    def update_content(self) -> None:
        """Show what the pollers found."""

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < MIN_COLUMNS or event.size.height < MIN_ROWS, "-too-small")
        self.call_after_refresh(self._update_if_on_top)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """In a terminal that is too small nothing is done that cannot be seen."""
        return action == "quit" or not self.has_class("-too-small")

    def show_title(self, left: str, right: str = "") -> None:
        """What this is at the left, what goes on at the right, and what is made up in between."""
        line = Text(no_wrap=True, end="", overflow="ellipsis")
        line.append(" gputrain ", STRONG)
        notice = self.gputrain_app.source_notice()
        told = Text(f" {left}", no_wrap=True)
        # What is made up is said before all else.
        told.truncate(
            max(self.size.width - line.cell_len - len(f"   {notice} " if notice else ""), 0), overflow="ellipsis"
        )
        line.append_text(told)
        if notice is not None:
            line.append("  ")
            line.append(f" {notice} ", NOTICE)
        room = self.size.width - line.cell_len - len(right) - 1
        if right and room > 0:
            line.append(" " * room + right)
        self.show_line("#title", line)

    def show_line(self, selector: str, line: Text) -> None:
        """Draw a line again only where it has changed."""
        static = self.query_one(selector, Static)
        if getattr(static, "shown", None) != line:
            static.shown = line  # type: ignore[attr-defined]
            # Its place does not hang on what it says: nothing else is to be laid out again.
            static.update(line, layout=False)

    @property
    def filter_text(self) -> str:
        found = self.query("#filter").results(Input)
        return next((one.value.strip().lower() for one in found), "")

    def action_filter(self) -> None:
        self.query_one(Filter).activate()

    async def action_back(self) -> None:
        """First out of the filter, then to the screen before."""
        for line in self.query(Filter):
            if line.display:
                line.action_dismiss()
                return
        await self.gputrain_app.action_back()

    @on(Input.Changed, "#filter")
    def _apply_filter(self) -> None:
        self.update_content()
