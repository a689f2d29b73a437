"""What a page says of one run, as text and pictures: the values of `page.html`."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from engine.base.codec import InvalidRecordError
from engine.base.text import list_names, pluralize
from engine.base.units import (
    format_count,
    format_score,
    format_utc,
)
from engine.config.command_line import format_value, repeat_arguments
from engine.config.differences import SESSION_KEYS
from engine.config.tasks import TASK_FACTS, per_output_mode
from engine.report.classes import ClassRow, class_columns, class_rows
from engine.report.lines import OwnRun, ReportedRun, shortened
from engine.report.table import Column, Row, text_cells
from engine.runs.evaluations import (
    ConfusionCounts,
    finite_points,
    read_evaluations,
    row_shares,
    worst_first,
)
from engine.runs.folder import RunState
from engine.runs.journal_source import COUNTED
from engine.runs.metrics import (
    Metric,
    Taken,
    format_metric,
)
from engine.runs.run_config import default_values

MAX_GPUS, MAX_HOSTS = 64, 16
MAX_FIGURES, MAX_PARAMETERS = 100, 300
MAX_VALUE_CHARACTERS = 400


@dataclass(frozen=True)
class Table(Generic[Row]):
    """A table of the page: its columns and rows, how many more rows there are, and which are set off."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    more: int = 0

    def cells(self, row: Row) -> tuple[str, ...]:
        """Return the cells of a row."""
        return text_cells(self.columns, row)


def state_text(run: OwnRun) -> str:
    """Return the state of a run, with why it ended if it did not finish."""
    finished = run.history.finished
    if run.row.state == RunState.CRASHED:
        return "crashed: its process ended without a word"
    if finished is None or run.row.state == RunState.FINISHED or not finished.message:
        return run.row.shown_state
    return f"{run.row.state}: {finished.message}"


def subtitle(run: ReportedRun) -> str:
    """Return what was trained, where and when, or which files the run was read from, in one line."""
    row, parts = run.row, list[str]()
    if not isinstance(run, OwnRun):
        changed = row.record.updated_at
        parts = [f"{', '.join(row.formats)} files in {row.folder}"]
        return ", ".join([*parts, *([f"last changed {format_utc(changed)}"] if changed else [])])
    if config := row.config:
        parts.append(f"{value_text(config.get('model.name'))} on {value_text(config.get('data.dataset'))}")
    if (started := run.history.started) is not None:
        devices = len(set(started.devices) - {"cpu"})
        where = pluralize(devices, "GPU") if devices else f"{pluralize(started.world_size, 'rank')} on the CPU"
        parts += [where, f"started {format_utc(started.time)}"]
    return ", ".join(parts)


def figures(run: ReportedRun, metrics: Iterable[Metric]) -> list[tuple[str, str]]:
    """Return the key figures, the most important first; none of a training before its start."""
    started = run.history.started if isinstance(run, OwnRun) else None
    if isinstance(run, OwnRun) and started is None:
        return []
    known = [
        (shortened(metric.label), format_metric(metric, value))
        for metric in metrics
        if (value := metric.of_run(run.row.record)) is not None
        and (metric.taken is not Taken.NOW or (metric.key == "step" and started is None))
    ]
    if started is None:
        return known[:MAX_FIGURES]
    counts = {
        "training images": started.train_images,
        "validation images": started.val_images,
        "classes": started.classes,
    }
    return [*known, *((name, format_count(count)) for name, count in counts.items())]


def value_text(value: Any) -> str:
    """Return a config value, a parameter or a label as text of bounded length."""
    text = format_value(value) or "none"
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "…"


def hardware(run: OwnRun) -> list[tuple[str, str]]:
    """Return hosts, devices, processes and versions of the last session."""
    started = run.history.started
    if started is None:
        return []
    hosts = list(dict.fromkeys([rank.host for rank in started.ranks] or [started.host]))
    gpus = list(dict.fromkeys(device for device in started.devices if device != "cpu"))
    devices = f"{pluralize(len(gpus), 'GPU')}: {list_names(gpus, MAX_GPUS)}" if gpus else "CPU"
    rows = [
        ("hosts", list_names(hosts, MAX_HOSTS)),
        ("devices", devices),
        ("backend", started.backend),
        ("batch size", f"{started.batch_size} per rank, {started.global_batch} in total"),
        ("input pipeline", f"{started.pipeline} ({started.pipeline_reason})"),
        ("precision", started.precision),
    ]
    return rows + [(f"version of {name}", version) for name, version in sorted(started.versions.items())]


CHANGE_COLUMNS: tuple[Column[tuple[str, Any, Any]], ...] = (
    Column("key", "key", lambda change: change[0]),
    Column("value", "value", lambda change: value_text(change[1])),
    Column("default", "default", lambda change: value_text(change[2])),
)


PARAMETER_COLUMNS = CHANGE_COLUMNS[:2]


def config_changes(run: ReportedRun) -> Table[tuple[str, Any, Any]]:
    """Return the config keys that differ from their defaults, or the parameters of a foreign run, sorted by key."""
    config, defaults = run.row.config or {}, default_values()
    if not isinstance(run, OwnRun):
        rows = [(shortened(key), value, None) for key, value in sorted(config.items())]
        return Table(PARAMETER_COLUMNS, rows[:MAX_PARAMETERS], len(rows) - MAX_PARAMETERS)
    rows = [
        (key, value, defaults[key])
        for key, value in config.items()
        if key in defaults and key not in SESSION_KEYS and value != defaults[key]
    ]
    return Table(CHANGE_COLUMNS, rows)


def repeat_command(run: OwnRun) -> str:
    """Return the command that trains the same again, for a shell; "" without a config."""
    config = run.row.config
    if config is None:
        return ""
    kept = {key: value for key, value in config.items() if key not in SESSION_KEYS}
    words = [shlex.quote(word) for word in repeat_arguments(kept, default_values())]
    return " \\\n    ".join(("gputrain run", *words))


def notes(run: ReportedRun) -> Iterator[str]:
    """Yield what a reader should know before the figures."""
    own = run if isinstance(run, OwnRun) else None
    if run.row.problem is not None:
        yield run.row.problem
    if own is not None and own.history.cpu_fallback:
        yield own.history.cpu_fallback
    if count := run.curves.count_not_finite(run.curves.keys if own is None else COUNTED):
        things = "values" if own is None else "losses or results"
        yield f"{count:,} {things} are not finite; the curves have gaps there."
    if own is not None and RunState(own.row.state).live:
        yield "The run is not over: this is its state when the report was made."


MAX_CLASSES = 200


class ClassSection(NamedTuple):
    """Results by class of the best epoch, or in `head` why there are none."""

    head: str
    matrix: Picture | None = None
    accuracies: Table[ClassRow] | None = None
    title: str = "Classes"
    scatters: Sequence[tuple[str, Picture]] = ()


def class_section(run: OwnRun) -> ClassSection:
    """Return the results of each class, label or number in the best epoch, the worst first, and pictures of them."""
    path = run.folder.evaluation
    try:
        evaluations = read_evaluations(path)
    except FileNotFoundError:
        return ClassSection("The run has no evaluation yet: it is written at the end of each epoch.")
    except OSError as error:
        return ClassSection(f"{path.name} cannot be read: {error.strerror}")
    except InvalidRecordError as error:
        return ClassSection(f"{path.name} {error}")
    best, facts = evaluations.best, TASK_FACTS[evaluations.task]
    top = {"top-1": best.top1, "top-5": best.top5} if facts.ranked else {}
    metrics = (f", {name} {format_score(value)}" for name, value in {"loss": best.loss, **top, **best.metrics}.items())
    head = f"Best epoch {best.epoch}: {best.images:,} validation images{''.join(metrics)}."
    counts, details = best.read_counts(), dict(best.details)
    if len(counts):
        details["images"] = tuple(counts.sum(1).tolist())
    names = list(map(shortened, evaluations.classes))
    known = class_rows(names, best.per_class, details)
    rows = [known[number] for number in worst_first(best.accuracies(), per_output_mode(facts))]
    table = Table(class_columns(evaluations.task, details), rows[:MAX_CLASSES], len(rows) - MAX_CLASSES)
    points = [(name, finite_points(pairs)) for name, pairs in zip(names, best.points, strict=False)]
    scatters = [(name, scatter_picture(pairs)) for name, pairs in points[:MAX_SCATTERS] if len(pairs)]
    matrix = matrix_picture(counts) if len(counts) else None
    return ClassSection(head, matrix, table, facts.outputs.capitalize(), scatters)


MAX_SCATTERS, SCATTER_PIXELS = 12, 400


def scatter_picture(points: NDArray[np.float64]) -> Picture:
    """Return predicted numbers, upwards, against true ones, to the right, with the line on which they are equal."""
    low, span = points.min(), np.ptp(points) or 1.0
    image = Image.new("RGB", (SCATTER_PIXELS, SCATTER_PIXELS), "white")
    draw = ImageDraw.Draw(image)
    draw.line((0, SCATTER_PIXELS, SCATTER_PIXELS, 0), _WRONG_COLOR)
    for predicted, true in (points - low) / span * (SCATTER_PIXELS - 1):
        draw.circle((true, SCATTER_PIXELS - 1 - predicted), 3, _RIGHT_COLOR)
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return Picture(data_uri("png", buffer.getvalue()), *image.size)


# A cell of the matrix has at least one pixel, and the whole matrix about this many a side.
MATRIX_PIXELS = 900
_LEVELS, _MIN_LEVEL = 127, 10
# White to the blue and the vermilion of Okabe and Ito.
_RIGHT_COLOR, _WRONG_COLOR = (0, 114, 178), (213, 94, 0)


class Picture(NamedTuple):
    """A picture: its data URI and its size in pixels."""

    uri: str
    width: int
    height: int


def matrix_picture(counts: ConfusionCounts) -> Picture:
    """Return a confusion matrix as a picture: right predictions are blue, mistakes vermilion, true classes in rows.

    A cell is as dark as the square root of its share of the true class, which makes rare mistakes visible."""
    shares = np.sqrt(row_shares(counts))
    levels = np.where(counts > 0, np.maximum(np.rint(_LEVELS * shares), _MIN_LEVEL), 0).astype(np.int64)
    indices = levels + np.where(np.eye(len(counts), dtype=bool), 0, _LEVELS + 1)
    scale = max(MATRIX_PIXELS // len(counts), 1)
    pixels = np.repeat(np.repeat(indices.astype(np.uint8), scale, 0), scale, 1)
    image = Image.fromarray(pixels, "P")
    shades = np.linspace(255, [_RIGHT_COLOR, _WRONG_COLOR], _LEVELS + 1, axis=1)
    image.putpalette(np.rint(shades).astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return Picture(data_uri("png", buffer.getvalue()), *image.size)


def data_uri(kind: str, data: bytes) -> str:
    """Return an image as a data URI. `kind` is the subtype of its MIME type, such as `png`."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
