"""A Textual app with the themes and toasts of gputrain.

`tui.screens.app` adds the screens and the pollers, `tui.terminal.driver` talks to the terminal.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from rich.theme import ThemeStackError
from textual import constants
from textual.app import App
from textual.screen import Screen

from engine.base.errors import Problem, UsageError
from engine.base.text import printable
from tui.terminal.driver import TerminalDriver, has_job_control
from tui.terminal.palette import ANSI, PALETTES, Palette, rich_theme
from tui.terminal.textual_internals import changed_cells
from tui.terminal.theme import initial_palette, save_palette, settle_terminal_type, textual_theme, why_own_colors

if TYPE_CHECKING:
    from rich.console import RenderableType

# With the default of 700, the monitor collects twice a second, for up to a tenth of its CPU time.
COLLECTED_OBJECTS = 50_000


def resume_garbage_collection() -> None:
    """End the pause of the garbage collector that `tui.screen` began, and exempt all objects that exist by now."""
    if not gc.isenabled():
        gc.freeze()
        gc.set_threshold(COLLECTED_OBJECTS)
        gc.enable()


class TerminalApp(App[None]):
    """Themes, toasts and the clipboard."""

    def __init__(self) -> None:
        settle_terminal_type()
        palette = initial_palette()
        # Textual renders NO_COLOR in shades of gray unless ANSI colors are requested before it reads the theme.
        super().__init__(
            # `TEXTUAL_DRIVER` names another one, such as that of a browser.
            driver_class=None if constants.DRIVER else TerminalDriver,
            ansi_color=True if palette is ANSI else None,
        )
        for known in PALETTES:
            self.register_theme(textual_theme(known))
        self._set_palette(palette)
        # `self.theme = …` would make Textual parse all style sheets twice before the first frame.
        self.set_reactive(App.theme, palette.name)
        self.stylesheet.set_variables(self.get_css_variables())
        self.animation_level = "none"

    def _set_palette(self, palette: Palette) -> None:
        """Use a palette for the style names in text; `theme` is that of the style sheets."""
        self.palette = palette
        # Replace the previous theme: `push_theme` alone would grow the stack with every change.
        with suppress(ThemeStackError):
            self.console.pop_theme()
        self.console.push_theme(rich_theme(palette))
        self.ansi_color = True if palette.ansi else None

    def action_next_theme(self) -> None:
        """Switch to the next theme and remember it."""
        palette = PALETTES[(PALETTES.index(self.palette) + 1) % len(PALETTES)]
        if reason := why_own_colors():
            self.show_toast(Problem("", f"{reason}: the terminal's own colors are used", code="no-effect"))
            return
        self._set_palette(palette)
        self.theme = palette.name
        self.refresh_css(animate=False)
        for screen in self.screen_stack:
            for widget in screen.walk_children():
                widget.refresh()
        try:
            save_palette(palette)
        except OSError as error:
            self.show_toast(Problem("", f"The theme cannot be remembered: {error.strerror}", code="not-writable"))
            return
        self.show_toast(f"Theme: {palette.name}", timeout_s=2)

    def show_toast(self, message: str | Problem | UsageError, *, timeout_s: float = 5.0) -> None:
        """Show a toast: a string as information, a problem as a warning. Control characters in a line are escaped."""
        severity: Literal["warning", "information"] = "information" if isinstance(message, str) else "warning"
        text = "\n".join(map(printable, str(message).split("\n")))
        self.notify(text, severity=severity, timeout=timeout_s, markup=False)

    def copy_to_clipboard(self, text: str, copied: str = "Copied to the clipboard") -> None:
        """Copy a text to the clipboard of the terminal, and say that it is `copied`, or what keeps it from there."""
        from tui.terminal.clipboard import clipboard_problem, is_multiplexed, pass_through

        def report(problem: Problem | None) -> None:
            self.show_toast(problem or copied, timeout_s=5.0 if problem is None else 15.0)

        if (problem := clipboard_problem(text, os.environ)) is not None:
            report(problem)
            return
        super().copy_to_clipboard(text)
        if is_multiplexed(os.environ):
            self.run_worker(
                lambda: self.call_from_thread(report, pass_through(text, os.environ)), thread=True, group="copy"
            )
        else:
            report(None)

    async def action_quit(self) -> None:
        self.exit()

    def action_suspend_process(self) -> None:
        """Stop the screen until `fg`."""
        if has_job_control():
            # The shell waits for the whole job, such as a script that started the screen.
            os.killpg(os.getpgrp(), signal.SIGTSTP)
        else:
            self.show_toast(Problem("", "No shell would continue the screen: Ctrl-Z has no effect", code="no-effect"))

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        super()._display(screen, changed_cells(renderable))
