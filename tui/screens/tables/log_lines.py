"""Lines of `log.txt` for the panel of the run screen: the time shortened, the metrics of an epoch in columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from rich.ansi import AnsiDecoder
from rich.text import Text

from engine.base.colors import colored_parts
from engine.base.text import printable
from engine.base.units import UNKNOWN
from engine.report.table import Align, pad
from engine.runs.metrics import METRIC_PREFIX, METRICS, format_known, format_of_epoch
from tui.screens.tables import styled
from tui.terminal.palette import MUTED, STRONG, series_style

if TYPE_CHECKING:
    from engine.runs.events import EpochEvent

STAMP = re.compile(r"\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d)  ")
TAB_COLUMNS = 8
MIN_BAR_COLUMNS = 4
BAR = re.compile(rf"\|([█▉▊▋▌▍▎▏ ]{{{MIN_BAR_COLUMNS},}})\|")
TRAIN_STYLE, VALIDATION_STYLE = series_style(1), series_style(2)


def log_lines(lines: Sequence[str], epochs: Sequence[EpochEvent]) -> list[Text]:
    """Return the lines as text. The line of an epoch in `epochs` gets its metrics in columns."""
    from engine.runs.event_lines import event_line

    by_line = {event_line(epoch): epoch for epoch in epochs}
    return [_log_line(line, by_line) for line in lines]


def output_line(line: str) -> Text:
    """Return a line of a log, which other programs may have written, as text with its colors."""
    text = styled(tuple((part, style and _style_definition(style)) for part, style in colored_parts(line)))
    if "\t" in text.plain:
        text.expand_tabs(TAB_COLUMNS)
    return text


def fit_bar(text: Text, width: int) -> Text:
    """Return a line of a log with the bar of tqdm shortened, if that makes the figures behind it fit the width."""
    excess = text.cell_len - width
    if excess <= 0 or (bar := BAR.search(text.plain)) is None:
        return text
    start, end = bar.span(1)
    columns = end - start - excess
    if columns < MIN_BAR_COLUMNS:
        return text
    filled = round(len(bar[1].rstrip()) * columns / (end - start))
    return text[:start].append(("█" * filled).ljust(columns)).append_text(text[end:])


@lru_cache(maxsize=1024)
def _style_definition(style: str) -> str:
    decoder = AnsiDecoder()
    decoder.decode_line(f"\x1b[{style}m")
    return str(decoder.style)


def _log_line(line: str, by_line: dict[str | None, EpochEvent]) -> Text:
    if (stamp := STAMP.match(line)) is None:
        return output_line(line)
    text = Text(no_wrap=True, end="").append(f"{stamp[1]}  ", MUTED)
    rest = line[stamp.end() :]
    epoch = by_line.get(rest)
    return text.append_text(output_line(rest) if epoch is None else _epoch_metrics(epoch))


def _epoch_metrics(epoch: EpochEvent) -> Text:
    """Return what an epoch reached, the most important metrics first."""
    shown = partial(format_of_epoch, epoch, pad(UNKNOWN, 6, Align.RIGHT))

    def with_accuracy(loss: str, accuracy: str) -> str:
        has_none = epoch.val_accuracy is None and epoch.train_accuracy is None
        return shown(loss) if has_none else f"{shown(loss)} / {shown(accuracy)}"

    rate = pad(format_known("images_per_second", epoch.images_per_second), 7, Align.RIGHT)
    seconds = pad(format_known("seconds", epoch.seconds), 7, Align.RIGHT)
    lr = format_known("lr", epoch.lr, UNKNOWN)
    skipped = {"steps": epoch.skipped_steps, "images": epoch.skipped_images}
    return Text.assemble(
        (f"epoch {pad(str(epoch.epoch), 3, Align.RIGHT)}", STRONG),
        ("   val ", VALIDATION_STYLE),
        with_accuracy("val_loss", "val_accuracy"),
        ("   train ", TRAIN_STYLE),
        with_accuracy("train_loss", "train_accuracy"),
        f"   ema {shown('ema_val_accuracy')}" if epoch.ema is not None else "",
        *(f"   {printable(name)} {shown(METRIC_PREFIX + name)}" for name in epoch.metrics),
        (f"   {rate} {METRICS['images_per_second'].label}  {seconds}   {METRICS['lr'].label} {lr}", MUTED),
        *(f"   {count} {things} skipped" for things, count in skipped.items() if count),
        no_wrap=True,
        end="",
    )
