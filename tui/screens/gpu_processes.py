"""Base class of the screens with a table of the processes on GPUs, the monitor and the GPU screen."""

from __future__ import annotations

from engine.gpus.snapshot import GpuProcess
from tui.phrases import holder_sentence
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.signals import ProcessSignaler
from tui.widgets.lines import Lines, escape_markup


class GpuProcessesScreen(GputrainScreen):
    """Names the process under the cursor of `#processes` if it holds a GPU without using it."""

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._signaler = ProcessSignaler(app)
        self._processes: dict[str, GpuProcess] = {}
        """The processes in the table, by the keys of their rows."""

    def _selected_process(self) -> GpuProcess | None:
        return self._processes.get(self.query_one("#processes", Lines).selected_key or "")

    def holder_title(self) -> str:
        """Return the sentence about the process under the cursor, as markup."""
        process = self._selected_process()
        sentence = "" if process is None else holder_sentence(process)
        return "" if process is None or not sentence else f"[$warning]pid {process.pid} {escape_markup(sentence)}[/]"

    def on_lines_moved(self, event: Lines.Moved) -> None:
        if event.lines.id == "processes":
            event.lines.set_titles(str(event.lines.border_title or ""), self.holder_title())
        self.update_keys()
