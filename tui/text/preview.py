"""A run at a glance: its curves, key figures, and the config keys that it changed.

`tui.text.preview_reader` reads them; `tui.widgets.preview` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from engine.runs.folder import RunState
from engine.runs.run_row import RunRow
from engine.utils.codec import UNSET
from engine.utils.text import pluralize, printable
from tui.palette import ACCENT, BAD, MUTED, STRONG, WARNING
from tui.text.run_lines import fit_cells, state_symbol
from tui.text.runs import format_age, format_duration, format_epoch
from tui.text.tables import wrap_text

if TYPE_CHECKING:
    from engine.runs.events import RunStarted
    from engine.runs.history import RunSummary
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
    summary: RunSummary
    started: RunStarted | None
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
    if row.bottleneck and row.state not in (RunState.FAILED, RunState.CRASHED):
        lines += _field("limit", Text(printable(row.bottleneck)), width)
    if row.cpu_fallback:
        lines += _field("on CPU", Text(printable(row.cpu_fallback), WARNING), width)
    return lines


def when_text(row: RunRow) -> str:
    """Return when a live run ends, or how long ago another one started. It changes with time, not only with the row."""
    if not row.live:
        return f"{format_age(row.age_seconds)} ago"
    return "" if row.eta_seconds is None else f"ETA {format_duration(row.eta_seconds)}"


def _result_lines(preview: RunPreview, width: int) -> list[Text]:
    summary, started, lines = preview.summary, preview.started, []
    if summary.best_val_accuracy is not UNSET:
        best = Text.assemble((f"{summary.best_val_accuracy:.4f}", ACCENT), (f"  at epoch {summary.best_epoch}", MUTED))
        lines += _field("best acc", best, width)
    losses = (("train", summary.train_loss), ("val", summary.val_loss))
    known = [f"{name} {value:.4f}" for name, value in losses if value is not None and value is not UNSET]
    if known:
        lines += _field("loss", Text("   ".join(known)), width)
    speed = [] if summary.images_per_second is UNSET else [f"{summary.images_per_second:,.0f} images/s"]
    if summary.seconds:
        speed.insert(0, format_duration(summary.seconds))
    if speed:
        lines += _field("time", Text("   ".join(speed)), width)
    if started is not None:
        gpus = len(set(started.devices) - {"cpu"})
        devices = pluralize(gpus, "GPU") if gpus else "CPU"
        parts = [devices, pluralize(started.world_size, "rank"), f"global batch {started.global_batch:,}"]
        lines += _field("hardware", Text("   ".join(parts)), width)
        lines += _field("host", Text(printable(started.host)), width)
        parts = [f"{started.parameters / 1e6:,.1f} M parameters", f"{started.classes:,} classes"]
        lines += _field("model", Text("   ".join([*parts, f"{started.train_images:,} images"])), width)
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
