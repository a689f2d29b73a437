"""Lines of `log.txt` for the panel of the run screen: the time shortened, the metrics of an epoch in columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.text import Text

from engine.runs.metrics import METRIC_PREFIX, METRICS, format_known, format_of_epoch
from engine.show.table import Align, pad
from engine.utils.text import printable
from engine.utils.units import UNKNOWN
from tui.palette import MUTED, STRONG, series_style

if TYPE_CHECKING:
    from engine.runs.events import EpochEvent

STAMP = re.compile(r"\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d)  ")
TRAIN_STYLE, VALIDATION_STYLE = series_style(1), series_style(2)


def log_lines(lines: Sequence[str], epochs: Sequence[EpochEvent]) -> list[Text]:
    """Return the lines as text. The line of an epoch in `epochs` gets its metrics in columns."""
    from engine.runs.event_lines import event_line

    by_line = {event_line(epoch): epoch for epoch in epochs}
    return [_log_line(line, by_line) for line in lines]


def _log_line(line: str, by_line: dict[str | None, EpochEvent]) -> Text:
    text = Text(no_wrap=True, end="")
    if (stamp := STAMP.match(line)) is None:
        return text.append(printable(line))
    text.append(f"{stamp[1]}  ", MUTED)
    rest = line[stamp.end() :]
    epoch = by_line.get(rest)
    return text.append(printable(rest)) if epoch is None else text.append_text(_epoch_metrics(epoch))


def _epoch_metrics(epoch: EpochEvent) -> Text:
    """Return what an epoch reached, the most important metrics first."""
    shown = partial(format_of_epoch, epoch, pad(UNKNOWN, 6, Align.RIGHT))
    text = Text.assemble(
        (f"epoch {pad(str(epoch.epoch), 3, Align.RIGHT)}", STRONG),
        ("   val ", VALIDATION_STYLE),
        f"{shown('val_loss')} / {shown('val_accuracy')}",
        ("   train ", TRAIN_STYLE),
        f"{shown('train_loss')} / {shown('train_accuracy')}",
        no_wrap=True,
        end="",
    )
    if epoch.ema is not None:
        text.append(f"   ema {shown('ema_val_accuracy')}")
    for name in epoch.metrics:
        text.append(f"   {printable(name)} {shown(METRIC_PREFIX + name)}")
    rate = pad(format_known("images_per_second", epoch.images_per_second), 7, Align.RIGHT)
    seconds = pad(format_known("seconds", epoch.seconds), 7, Align.RIGHT)
    lr = format_known("lr", epoch.lr, UNKNOWN)
    text.append(f"   {rate} {METRICS['images_per_second'].label}  {seconds}   {METRICS['lr'].label} {lr}", MUTED)
    if epoch.skipped_steps:
        text.append(f"   {epoch.skipped_steps} steps skipped")
    if epoch.skipped_images:
        text.append(f"   {epoch.skipped_images} images skipped")
    return text
