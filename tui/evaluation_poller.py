"""Polls a run's `evaluation.json`. Apart from `tui.pollers` because it needs NumPy."""

from __future__ import annotations

from pathlib import Path

from tui.pollers import Feed
from tui.text.confusion import Evaluations, read_evaluations


class EvaluationFeed(Feed):
    """The evaluations of a run, read again when their file has changed; `problem` is why they cannot be."""

    def __init__(self, path: Path, period: float = 1.0) -> None:
        super().__init__("evaluation", period)
        self._path = path
        self._mark: tuple[int, ...] | None = None
        self.now: Evaluations | None = None
        self.problem: str | None = None
        self.looked = False

    def look(self) -> None:
        try:
            status = self._path.stat()
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            if mark != self._mark:
                self.now, self.problem = read_evaluations(self._path), None
                self._mark = mark
        except FileNotFoundError:
            self.now, self.problem, self._mark = None, None, None
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"
        except ValueError as error:
            self.problem, self._mark = f"{self._path.name} cannot be read: {error}", mark
        self.looked = True
