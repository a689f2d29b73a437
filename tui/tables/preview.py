"""A run at a glance: its curves, results, and the config keys that it changed.

`tui.pollers.preview` reads them; `tui.widgets.preview` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from engine.runs.fields import as_text
from engine.runs.folder import RunState
from engine.runs.foreign_record import by_importance
from engine.runs.metrics import METRIC_PREFIX, METRICS, format_metric, metric_of_key
from engine.runs.run_row import RunRow
from engine.show.table import pad
from engine.utils.text import printable
from engine.utils.units import format_count
from tui.palette import ACCENT, BAD, MUTED, STRONG, WARNING
from tui.phrases import epochs_text, state_symbol, when_text
from tui.tables import fact_lines, wrap_text

if TYPE_CHECKING:
    from engine.runs.run_record import RunRecord
    from engine.show.charts import Chart
    from tui.charts.plot import Curve, PlotWindow
    from tui.tables.config import ConfigChange

MAX_CHARTS, MAX_METRICS, MAX_COMMAND_LINES = 2, 4, 2
LABEL_COLUMNS = 14
# The metrics of each line; the first known one gives the line its label.
METRIC_LINES = (
    ("best_val_accuracy", "best_epoch"),
    ("train_loss", "val_loss"),
    ("seconds", "images_per_second"),
    ("gpus", "ranks", "global_batch"),
    ("parameters",),
)


@dataclass(frozen=True, eq=False)
class RunPreview:
    """What a preview shows of a run besides its row in the list. `curves` holds the curves of the `charts` by id."""

    folder: str
    curves: Mapping[str, Sequence[Curve]]
    windows: Mapping[str, PlotWindow]
    record: RunRecord
    changes: tuple[ConfigChange, ...]
    charts: tuple[Chart, ...]

    def parameter_lines(self, width: int) -> list[Text]:
        """Return the config keys that the run changed, or the parameters of its command."""
        if not self.record.command:
            return change_lines(self.changes, width)
        parameters = self.record.command_parameters
        if not parameters:
            return [Text("The command has no parameters", MUTED)]
        lines = fact_lines({printable(key): printable(as_text(value)) for key, value in parameters.items()})
        return [Text("Parameters", STRONG), *(Text(line, no_wrap=True, end="") for line in lines)]


def figure_lines(row: RunRow, preview: RunPreview | None, width: int) -> list[Text]:
    """Return state, results and hardware of a run, as labels and values wrapped to `width` columns."""
    sign, style = state_symbol(row.shown_state)
    epoch = epochs_text(row) if row.trials or row.record.command else f"{METRICS['epochs'].label} {epochs_text(row)}"
    state = Text.assemble((f"{sign} {row.shown_state}", style or STRONG), f"  {epoch}  ", (when_text(row), MUTED))
    lines = _field("state", state, width)
    if row.message:
        failed = row.state in (RunState.FAILED, RunState.CRASHED)
        style = BAD if failed else WARNING if row.live and row.state != RunState.WAITING else ""
        lines += _field("reason" if failed or row.live else "result", Text(printable(row.message), style), width)
    if row.record.command:
        lines += _field("command", Text(printable(row.record.command)), width)[:MAX_COMMAND_LINES]
    if row.foreign:
        lines += _field("foreign", Text(f"This run {printable(row.foreign)}", WARNING), width)
    if preview is not None:
        lines += _result_lines(preview, width)
    if row.record.bottleneck and row.state not in (RunState.FAILED, RunState.CRASHED):
        lines += _field("limit", Text(printable(row.record.bottleneck.message)), width)
    if row.record.learning:
        lines += _field("learning", Text(printable(row.record.learning.message), WARNING), width)
    if row.record.cpu_fallback:
        lines += _field("on CPU", Text(printable(row.record.cpu_fallback), WARNING), width)
    return lines


def _result_lines(preview: RunPreview, width: int) -> list[Text]:
    record, lines = preview.record, list[Text]()
    own = (
        by_importance(key for key in record.values if key.startswith(METRIC_PREFIX))[:MAX_METRICS]
        if record.command
        else []
    )
    for keys in (*METRIC_LINES, own):
        metrics = map(metric_of_key, keys)
        values = ((metric, metric.of_run(record)) for metric in metrics if record.count("gpus") or metric.key != "gpus")
        known = [(metric.label, format_metric(metric, value)) for metric, value in values if value is not None]
        if not known:
            continue
        (label, first), *others = known
        line = Text.assemble((first, ACCENT if "best_val_accuracy" in keys else ""))
        for name, text in others:
            line.append(f"   {name} ", MUTED).append(text)
        lines += _field(label, line, width)
    if "ranks" in record.values:
        data = f"{format_count(record.classes or 0)} classes   {format_count(record.train_images or 0)} images"
        lines += _field("host", Text(f"{printable(record.host)}   {data}"), width)
    return lines


def _field(label: str, value: Text, width: int) -> list[Text]:
    """Return a value beside its label, wrapped below itself."""
    parts = wrap_text(value, max(width - LABEL_COLUMNS, 10))
    labels = [label, *[""] * (len(parts) - 1)]
    return [
        Text.assemble((pad(name, LABEL_COLUMNS), MUTED), part, no_wrap=True, end="")
        for name, part in zip(labels, parts, strict=True)
    ]


def change_lines(changes: Sequence[ConfigChange], width: int) -> list[Text]:
    """Return a heading, and the changed config keys with their values, and their defaults where they fit."""
    if not changes:
        return [Text("All config keys have their defaults", MUTED)]
    key_columns = min(max(len(change.key) for change in changes), max(width // 2, 1))
    lines = [Text("Changed config keys", STRONG)]
    for change in changes:
        line = Text.assemble((pad(change.key, key_columns), MUTED), "  ", change.value or "none")
        default = f"  ({change.default or 'none'})"
        if line.cell_len + cell_len(default) <= width:
            line.append(default, MUTED)
        lines.append(line)
    return lines
