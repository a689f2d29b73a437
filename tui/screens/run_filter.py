"""The filter of the list of runs, with the filters typed before."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input

from tui.screens.base import Filter

MAX_FILTERS = 20
FILTER_HINT = "failed optim.name=adamw val_accuracy>0.9 -tag=old; enter keeps it, esc clears it"


class RunFilter(Filter):
    """The filter of the runs, in the query language of `engine.runs.query`. The arrow keys bring back earlier ones."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "recall(-1)", show=False),
        Binding("down", "recall(1)", show=False),
    ]

    def __init__(self, history: list[str], hint: str = FILTER_HINT) -> None:
        super().__init__(placeholder=hint)
        self._history, self._position = history, 0

    def activate(self) -> None:
        super().activate()
        self._position = len(self._history)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        super().on_input_submitted(event)
        if text := self.value.strip():
            self._history[:] = [*(earlier for earlier in self._history if earlier != text), text][-MAX_FILTERS:]

    def action_recall(self, steps: int) -> None:
        """Show an earlier or a later filter."""
        self._position = min(max(self._position + steps, 0), len(self._history))
        self.value = self._history[self._position] if self._position < len(self._history) else ""
        self.cursor_position = len(self.value)
