"""A run at a glance: its curves, results, and the config keys that it changed.

`tui.text.preview_reader` reads them; `tui.widgets.preview` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from engine.runs.folder import RunState
from engine.runs.metrics import METRICS, format_known, format_metric
from engine.runs.run_row import RunRow
from engine.utils.text import pluralize, printable
from tui.palette import ACCENT, BAD, MUTED, STRONG, WARNING
from tui.text.run_lines import fit_cells, state_symbol
from tui.text.runs import format_age, format_duration, format_epoch
from tui.text.tables import wrap_text

if TYPE_CHECKING:
    from engine.runs.run_record import RunRecord
    from tui.charts.plot import Curve, PlotWindow
    from tui.text.config import ConfigChange

CHARTS = ("loss", "accuracy")
LABEL_COLUMNS = 10


@dataclass(frozen=True, eq=False)
class RunPreview:
    """What a preview shows of a run besides its row in the list. `curves` holds the curves of each of the `CHARTS`."""

    folder: str
    curves: Mapping[str, Sequence[Curve]]
    window: PlotWindow
    record: RunRecord
    changes: tuple[ConfigChange, ...]


def figure_lines(row: RunRow, preview: RunPreview | None, width: int) -> list[Text]:
    """Return state, results and hardware of a run, as labels and values wrapped to `width` columns."""
    sign, style = state_symbol(row.state)
    epoch = format_epoch(row) if row.trials else f"epoch {format_epoch(row)}"
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


def when_text(row: RunRow) -> str:
    """Return when a live run ends, or how long ago another one started. It changes with time, not only with the row."""
    if not row.live:
        return f"{format_age(row.age_seconds)} ago"
    return "" if row.record.eta_seconds is None else f"ETA {format_duration(row.record.eta_seconds)}"


def _result_lines(preview: RunPreview, width: int) -> list[Text]:
    record, lines = preview.record, list[Text]()
    if record.best_val_accuracy is not None:
        best = Text.assemble((format_known("best_val_accuracy", record.best_val_accuracy), ACCENT))
        best.append(f"  at epoch {record.best_epoch}", MUTED)
        lines += _field(METRICS["best_val_accuracy"].short_label, best, width)
    losses = (("train", METRICS["train_loss"]), ("val", METRICS["val_loss"]))
    values = ((name, metric, metric.of_run(record)) for name, metric in losses)
    if known := [f"{name} {format_metric(metric, value)}" for name, metric, value in values if value is not None]:
        lines += _field("loss", Text("   ".join(known)), width)
    rate = format_known("images_per_second", record.images_per_second)
    speed = (format_duration(record.seconds) if record.seconds else "", rate and f"{rate} images/s")
    if any(speed):
        lines += _field("time", Text("   ".join(filter(None, speed))), width)
    if record.ranks is not None:
        devices = pluralize(record.gpus, "GPU") if record.gpus else "CPU"
        parts = [devices, pluralize(record.ranks, "rank"), f"global batch {record.global_batch or 0:,}"]
        lines += _field("hardware", Text("   ".join(parts)), width)
        lines += _field("host", Text(printable(record.host)), width)
        parts = [f"{(record.parameters or 0) / 1e6:,.1f} M parameters", f"{record.classes or 0:,} classes"]
        lines += _field("model", Text("   ".join([*parts, f"{record.train_images or 0:,} images"])), width)
    return lines


def _field(label: str, value: Text, width: int) -> list[Text]:
    """Return a value beside its label, wrapped below itself."""
    parts = wrap_text(value, max(width - LABEL_COLUMNS, 10))
    labels = [label, *[""] * (len(parts) - 1)]
    return [
        Text.assemble((name.ljust(LABEL_COLUMNS), MUTED), part, no_wrap=True, end="")
        for name, part in zip(labels, parts, strict=True)
    ]


def change_lines(changes: Sequence[ConfigChange], width: int) -> list[Text]:
    """Return a heading, and the changed config keys with their values, and their defaults where they fit."""
    if not changes:
        return [Text("All config keys have their defaults", MUTED)]
    key_columns = min(max(len(change.key) for change in changes), max(width // 2, 1))
    lines = [Text("Changed config keys", STRONG)]
    for change in changes:
        line = Text.assemble((fit_cells(change.key, key_columns), MUTED), "  ", change.value or "none")
        default = f"  ({change.default or 'none'})"
        if line.cell_len + cell_len(default) <= width:
            line.append(default, MUTED)
        lines.append(line)
    return lines
