"""Base class of the screens with a table of the processes on GPUs, the monitor and the GPU screen."""

from __future__ import annotations

from engine.gpus.snapshot import GpuProcess
from engine.utils.errors import Problem
from tui.phrases import holder_sentence
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.signals import ProcessSignaler
from tui.widgets.lines import Lines, escape_markup


class GpuProcessesScreen(GputrainScreen):
    """Names the process under the cursor of `#processes` if it holds a GPU without using it, and lists orphans."""

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

    @property
    def has_orphans(self) -> bool:
        """Whether an orphan uses a GPU."""
        snapshot = self.gputrain_app.gpu_poller.snapshot
        gpus = () if snapshot is None else snapshot.gpus
        return any(process.orphan_of for gpu in gpus for process in gpu.processes.value or ())

    def action_orphans(self) -> None:
        """List the orphans of this user, also those that use no GPU."""
        from tui.screens.orphans import OrphansScreen

        if self.gputrain_app.demo_notice:
            self.gputrain_app.show_toast(Problem("", "Demo mode: the processes are simulated", code="not-supported"))
        else:
            self.app.push_screen(OrphansScreen(self.gputrain_app))
