"""The runs whose previews are shown: `tui.pollers.preview` reads each of them, `tui.widgets.preview` draws it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.runs.folder import RunFolder

if TYPE_CHECKING:
    from tui.pollers.preview import PreviewReader
    from tui.tables.preview import RunPreview

MAX_PREVIEWS = 64


class RunPreviews:
    """Reads the run that was requested last. It keeps the readers of `MAX_PREVIEWS` runs, so that a preview appears at
    once when its run is shown again."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._readers: dict[str, PreviewReader] = {}
        self._previews: dict[str, RunPreview] = {}

    def request(self, folder: str | None) -> None:
        """Read the run in `folder` next, or none."""
        self._folder = folder

    def find(self, folder: str) -> RunPreview | None:
        """Return the latest preview of a run; None if it has not been read."""
        return self._previews.get(folder)

    def read(self) -> RunPreview | None:
        """Return the preview of the requested run: the same object as before if the run has not changed."""
        folder = self._folder
        if folder is None:
            return None
        # Imports NumPy and the config schema, which the first screen does not need.
        from tui.pollers.preview import PreviewReader

        reader = self._readers.pop(folder, None) or PreviewReader(RunFolder(Path(folder)))
        self._readers[folder] = reader
        preview = self._previews[folder] = reader.poll()
        while len(self._readers) > MAX_PREVIEWS:
            oldest = next(iter(self._readers))
            del self._readers[oldest]
            # A run that could not be read has no preview.
            self._previews.pop(oldest, None)
        return preview
