"""The last lines of the log of a run, which may be as long as the run."""

from __future__ import annotations

from pathlib import Path

from engine.utils.files import open_regular_file

MAX_LOG_BYTES = 1 << 16
MAX_LOG_LINES = 2000
# Longer lines fit on no screen, and are slow to draw.
MAX_LOG_LINE_LENGTH = 4096


class LogTail:
    """Reads the last lines of a growing log file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1
        self._lines: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Return the last lines, reread only when the file size changed."""
        try:
            size = self._path.stat().st_size
            if size != self._size:
                with open_regular_file(self._path) as file:
                    start = max(size - MAX_LOG_BYTES, 0)
                    file.seek(start)
                    text = file.read(MAX_LOG_BYTES).decode(errors="replace")
                lines = text.splitlines()[1 if start else 0 :][-MAX_LOG_LINES:]
                self._size, self._lines = size, tuple(line[:MAX_LOG_LINE_LENGTH] for line in lines)
        except OSError:
            pass
        return self._lines
