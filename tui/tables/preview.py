"""A run at a glance: its curves, results, and the config keys that it changed.

`tui.pollers.preview` reads them; `tui.widgets.preview` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from engine.runs.folder import RunState
from engine.runs.metrics import METRICS, format_metric
from engine.runs.run_row import RunRow
from engine.show.charts import Place, charts_of
from engine.show.table import pad
from engine.utils.text import printable
from engine.utils.units import format_count
from tui.palette import ACCENT, BAD, MUTED, STRONG, WARNING
from tui.phrases import epochs_text, state_symbol, when_text
from tui.tables import wrap_text

if TYPE_CHECKING:
    from engine.runs.run_record import RunRecord
    from tui.charts.plot import Curve, PlotWindow
    from tui.tables.config import ConfigChange

PREVIEW_CHARTS = charts_of(Place.PREVIEW)
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
    """What a preview shows of a run besides its row in the list. `curves` holds the curves of the
    `PREVIEW_CHARTS` by id."""

    folder: str
    curves: Mapping[str, Sequence[Curve]]
    window: PlotWindow
    record: RunRecord
    changes: tuple[ConfigChange, ...]


def figure_lines(row: RunRow, preview: RunPreview | None, width: int) -> list[Text]:
    """Return state, results and hardware of a run, as labels and values wrapped to `width` columns."""
    sign, style = state_symbol(row.state)
    epoch = epochs_text(row) if row.trials else f"{METRICS['epochs'].label} {epochs_text(row)}"
    state = Text.assemble((f"{sign} {row.state}", style or STRONG), f"  {epoch}  ", (when_text(row), MUTED))
    lines = _field("state", state, width)
    if row.message:
        failed = row.state in (RunState.FAILED, RunState.CRASHED)
        style = BAD if failed else WARNING if row.live and row.state != RunState.WAITING else ""
        lines += _field("reason" if failed or row.live else "result", Text(printable(row.message), style), width)
    if row.foreign:
        lines += _field("foreign", Text(f"This run {printable(row.foreign)}", WARNING), width)
    if preview is not None:
        lines += _result_lines(preview, width)
    if row.record.bottleneck and row.state not in (RunState.FAILED, RunState.CRASHED):
        lines += _field("limit", Text(printable(row.record.bottleneck.message)), width)
    if row.record.cpu_fallback:
        lines += _field("on CPU", Text(printable(row.record.cpu_fallback), WARNING), width)
    return lines


def _result_lines(preview: RunPreview, width: int) -> list[Text]:
    record, lines = preview.record, list[Text]()
    for keys in METRIC_LINES:
        values = ((METRICS[key], METRICS[key].of_run(record)) for key in keys)
        known = [(metric.label, format_metric(metric, value)) for metric, value in values if value is not None]
        if not known:
            continue
        (label, first), *others = known
        line = Text.assemble((first, ACCENT if keys[0] == "best_val_accuracy" else ""))
        for name, text in others:
            line.append(f"   {name} ", MUTED).append(text)
        lines += _field(label, line, width)
    if record.ranks is not None:
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
