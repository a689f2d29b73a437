"""The metrics of the run of a command, for what shows, compares and reports it as it does foreign runs."""

from __future__ import annotations

from engine.base.files import FileStamp, find_file_stamp
from engine.jobs.command.metric_files import FILES_FILE, OUTPUT_FILE, OWN_FILE, CommandMetrics, command_metrics
from engine.jobs.command.spec import has_command
from engine.runs.folder import RunFolder
from engine.runs.run_record import read_run_record


def metrics_of_run(folder: RunFolder) -> CommandMetrics | None:
    """Return the metrics that the command of a run has by now; None for a training."""
    return MetricsFinder(folder).find() if has_command(folder) else None


class MetricsFinder:
    """Finds the metrics of the run of a command, again and again: it gets more files while it runs."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._known: tuple[object, CommandMetrics] | None = None

    def find(self) -> CommandMetrics:
        """Return the metrics: the same object as before if there are no other files."""
        key = self._stamps()
        if self._known is None or self._known[0] != key:
            found = self._find()
            before = None if self._known is None else self._known[1]
            is_same = before is not None and before.log_ids() == found.log_ids()
            self._known = key, before if before is not None and is_same else found
        return self._known[1]

    def _stamps(self) -> tuple[FileStamp | None, bool, bool]:
        metrics = self._folder.metrics
        has_own, has_output = (find_file_stamp(metrics / name) is not None for name in (OWN_FILE, OUTPUT_FILE))
        return find_file_stamp(metrics / FILES_FILE), has_own, has_output

    def _find(self) -> CommandMetrics:
        record = read_run_record(self._folder)
        is_own = self._folder.foreign_reason() is None
        arguments = {} if record is None else dict(record.command_parameters)
        return command_metrics(self._folder.path, arguments=arguments, is_own=is_own)
