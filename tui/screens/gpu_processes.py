"""Base class of the monitor and the GPU screen: a table of the processes on GPUs, and graphs of the past."""

from __future__ import annotations

from engine.gpus.snapshot import GpuProcess
from tui.charts.history import SPANS, automatic_span
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
        self._chosen_span: int | None = None
        """Index in `SPANS` of the time that the graphs show; None until the user zooms."""

    def past_seconds(self) -> float:
        """Return how long the readings of the screen have been recorded."""
        poller = self.gputrain_app.gpu_poller
        start = poller.loads.start_time
        return poller.snapshot.time - start if poller.snapshot is not None and start is not None else 0.0

    @property
    def span(self) -> int:
        """The index in `SPANS` of what was chosen, else of the shortest time that holds all that was recorded."""
        return automatic_span(self.past_seconds()) if self._chosen_span is None else self._chosen_span

    def action_zoom(self, steps: int) -> None:
        """Show a longer or a shorter time in the graphs."""
        current = self.span
        self._chosen_span = min(max(current + steps, 0), len(SPANS) - 1)
        if self._chosen_span == current:
            self.gputrain_app.show_toast(f"{'Longer' if steps > 0 else 'Shorter'} times cannot be shown")
        self.update_if_on_top()

    def action_zoom_auto(self) -> None:
        """Show all of the past, ten minutes at most."""
        self._chosen_span = None
        self.update_if_on_top()

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
