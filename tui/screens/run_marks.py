"""The marked runs of the run list, which commands are about instead of the selected run."""

from __future__ import annotations

from collections.abc import Sequence

from engine.runs.run_row import RunRow


class RunMarks:
    """Marks runs by their folders in `marked`, which the application keeps while the list is closed."""

    def __init__(self, marked: dict[str, None]) -> None:
        self._marked = marked
        self._rows: Sequence[RunRow] = ()
        self._rows_by_folder: dict[str, RunRow] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """The folders of the marked runs."""
        return tuple(self._marked)

    def rows(self, rows: Sequence[RunRow]) -> list[RunRow]:
        """Return the marked ones of all rows, in the order in which they were marked."""
        if not (marked := self._marked):
            return []
        if self._rows is not rows:
            self._rows, self._rows_by_folder = rows, {row.folder: row for row in rows}
        return [self._rows_by_folder[key] for key in marked if key in self._rows_by_folder]

    def contain(self, rows: Sequence[RunRow]) -> bool:
        """Whether all of the runs are marked."""
        return all(row.folder in self._marked for row in rows)

    def toggle(self, rows: Sequence[RunRow]) -> None:
        """Mark the runs; if all are marked, unmark them."""
        marked, keys = self._marked, [row.folder for row in rows]
        if self.contain(rows):
            for key in keys:
                del marked[key]
        else:
            marked.update(dict.fromkeys(keys))
