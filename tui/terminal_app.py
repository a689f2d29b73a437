"""A Textual app with the themes of gputrain that exits cleanly on the signals of a terminal.

`tui.app` adds the screens and the pollers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rich.theme import ThemeStackError
from textual.app import App, SystemCommand
from textual.screen import Screen

from engine.utils.text import printable
from tui.palette import ANSI, PALETTES, Palette, rich_theme
from tui.theme import initial_palette, save_palette, textual_theme

EXIT_GRACE_SECONDS = 1.5


class TerminalApp(App[None]):
    """Themes, toasts, screenshots and signal handlers."""

    def __init__(self) -> None:
        palette = initial_palette()
        # Textual renders NO_COLOR in shades of gray unless ANSI colors are requested before it reads the theme.
        super().__init__(ansi_color=True if palette is ANSI else None)
        for known in PALETTES:
            self.register_theme(textual_theme(known))
        self._set_palette(palette)
        # `self.theme = …` would make Textual parse all style sheets twice before the first frame.
        self.set_reactive(App.theme, palette.name)
        self.stylesheet.set_variables(self.get_css_variables())
        self.animation_level = "none"
        self._got_sigtstp = False

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
        if self.no_color:
            self.show_toast("NO_COLOR is set: the terminal's own colors are used", warning=True)
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
            self.show_toast(f"The theme cannot be remembered: {error.strerror}", warning=True)
            return
        self.show_toast(f"Theme: {palette.name}", timeout_s=2)

    def action_save_screenshot(self) -> None:
        """Save the screen as SVG in the working directory."""
        path = Path(f"gputrain-{time.strftime('%Y%m%d-%H%M%S')}.svg")
        try:
            # Exclusively: a link of this name is not followed.
            with path.open("x", encoding="utf-8") as file:
                file.write(self.export_screenshot())
        except OSError as error:
            self.show_toast(f"{path} cannot be written to the working directory: {error.strerror}", warning=True)
            return
        self.show_toast(f"Saved {path.absolute()}", timeout_s=8)

    def show_toast(self, message: str, *, warning: bool = False, timeout_s: float = 5.0) -> None:
        """Show a toast; control characters in the message are escaped."""
        self.notify(
            printable(message), severity="warning" if warning else "information", timeout=timeout_s, markup=False
        )

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        return ()

    async def action_quit(self) -> None:
        self.exit()

    def install_signal_handlers(self) -> None:
        """Exit on SIGHUP and SIGTERM, and survive being suspended. Call it in the main thread, in the event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGHUP, signal.SIGTERM):
            loop.add_signal_handler(number, self._exit_on_signal, number)
        suspend, resume = signal.getsignal(signal.SIGTSTP), signal.getsignal(signal.SIGCONT)

        def suspended(number: int, frame: FrameType | None) -> None:
            self._got_sigtstp = True
            if callable(suspend):
                suspend(number, frame)

        def continued(number: int, frame: FrameType | None) -> None:
            # Textual re-enters application mode at every SIGCONT. After a SIGSTOP it never left that mode: a second
            # entry would start a second keyboard reader and leave the terminal in raw mode on exit.
            if not self._got_sigtstp:
                loop.call_soon_threadsafe(self.refresh)
            elif callable(resume):
                self._got_sigtstp = False
                resume(number, frame)

        signal.signal(signal.SIGTSTP, suspended)
        signal.signal(signal.SIGCONT, continued)

    def _exit_on_signal(self, signum: int) -> None:
        """Exit on SIGHUP or SIGTERM; the timer forces it, because writes to a closed terminal can block forever."""
        timer = threading.Timer(EXIT_GRACE_SECONDS, os._exit, [128 + signum])
        timer.daemon = True
        timer.start()
        self.exit(return_code=128 + signum)
