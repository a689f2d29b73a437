"""The charts: which curves each one has, where it is shown, and how it is drawn.

Screens (`tui.charts`), and the pages and figures of `gputrain report` (`engine.report`) take the charts of a training
from the table `CHARTS`; to add a chart, add a row. A chart of one metric has the label of that metric in
`engine.runs.metrics`, without `best`. Metrics that are not known in advance are grouped by their names
(`group_metrics`): those of training and validation share a chart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, Flag, IntEnum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine.runs.metrics import METRIC_PREFIX, NO_METRICS, STEP_QUANTITIES, Better, Unit, better_of_name, find_metric
from engine.watch.reading import EPOCH_NAMES, STEP_NAMES

if TYPE_CHECKING:
    from engine.runs.curves import Curves


class MeasuredOn(Enum):
    """What the values of a curve are measured on. The value is its name in the legend of a screen."""

    TRAINING = "train"
    VALIDATION = "val"
    EMA = "ema"
    """The validation set, with the EMA weights."""
    TEST = "test"
    TOP5 = "top-5"
    ONLY = ""
    """The only curve of its chart needs no name."""


class Place(Flag):
    """Where a chart is shown."""

    RUN = auto()
    """The screen of a run."""
    COMPARE = auto()
    """The screen that compares runs."""
    REPORT_OF_ONE = auto()
    """The report on one run."""
    REPORT_OF_SEVERAL = auto()
    PLOT = auto()
    """A figure of `gputrain report -o FILE.pdf`, which also takes the key of each other metric."""


@dataclass(frozen=True)
class Chart:
    """A chart of one run, or of one metric of several runs. `metrics` maps the key of each curve to its source."""

    id: str
    title: str
    metrics: Mapping[str, MeasuredOn]
    smoothed: bool = False
    """Whether its curves have a value for each step, and are averaged over steps on demand."""
    log: bool = True
    """Whether it may have a log scale, which would hide the differences of shares near 1."""
    from_zero: bool = False
    """Whether its y axis begins at zero in a report."""
    color: int = 1
    """Number of the color of a chart of one curve."""
    marked: Better = Better.NEITHER
    """Which value of its validation a screen marks as the best one."""
    is_optional: bool = False
    """Whether a run with other curves, but without these, does not show it."""
    places: Place = Place.PLOT

    def is_smoothed(self, key: str) -> bool:
        """Whether a curve is averaged over steps: the validation has one value for each epoch."""
        return self.smoothed and self.metrics[key] in (MeasuredOn.TRAINING, MeasuredOn.ONLY)


def metric_chart(key: str, directions: Mapping[str, Better] = NO_METRICS, **fields: Any) -> Chart:
    """Return the chart of one metric, also of the user's own one `metrics.NAME`, whose direction may be stored.
    `fields` are further ones of the chart."""
    metric = find_metric(key, directions)
    is_share = metric.unit is Unit.SHARE or (metric.unit is Unit.SCORE and metric.better is Better.HIGH)
    # A curve has the values of all epochs, also that of the metric by which the best epoch is chosen.
    title = metric.label.removeprefix("best ").removeprefix("lowest ") if metric.epoch is not None else metric.label
    return replace(Chart(key, title, {key: MeasuredOn.ONLY}, log=not is_share), **fields)


_REPORTS = Place.REPORT_OF_ONE | Place.REPORT_OF_SEVERAL
_ROWS = (
    Chart(
        "loss", "loss",
        {"train_loss": MeasuredOn.TRAINING, "val_loss": MeasuredOn.VALIDATION, "ema_val_loss": MeasuredOn.EMA},
        smoothed=True, places=Place.RUN | Place.REPORT_OF_ONE | Place.PLOT,
    ),
    Chart(
        "accuracy", "accuracy",
        {
            "train_accuracy": MeasuredOn.TRAINING, "val_accuracy": MeasuredOn.VALIDATION,
            "ema_val_accuracy": MeasuredOn.EMA,
            "val_top5": MeasuredOn.TOP5,
        },
        log=False, marked=Better.HIGH, places=Place.RUN | Place.REPORT_OF_ONE,
    ),
    metric_chart("train_loss", smoothed=True, places=Place.COMPARE | Place.REPORT_OF_SEVERAL),
    metric_chart("best_val_accuracy", places=Place.COMPARE | Place.REPORT_OF_SEVERAL),
    metric_chart("best_val_loss", places=Place.COMPARE | Place.REPORT_OF_SEVERAL),
    metric_chart("lr", from_zero=True, color=3, places=Place.RUN | Place.COMPARE | _REPORTS),
    *(
        metric_chart(key, smoothed=True, is_optional=True, color=5, places=Place.RUN | Place.COMPARE)
        for key in STEP_QUANTITIES
    ),
    metric_chart("images_per_second", from_zero=True, places=_REPORTS),
)  # fmt: skip
CHARTS: Mapping[str, Chart] = {chart.id: chart for chart in _ROWS}


def charts_of(place: Place) -> tuple[Chart, ...]:
    """Return the charts of a place, in the order of their importance."""
    return tuple(chart for chart in CHARTS.values() if place in chart.places)


def find_chart(key: str, directions: Mapping[str, Better] = NO_METRICS) -> Chart:
    """Return a chart of the table by its id, or the chart of any other metric."""
    return CHARTS.get(key) or metric_chart(key, directions)


# The word of a name that says what a metric was measured on, in lower case.
SOURCE_WORDS = {
    "train": MeasuredOn.TRAINING, "training": MeasuredOn.TRAINING,
    "val": MeasuredOn.VALIDATION, "valid": MeasuredOn.VALIDATION, "validation": MeasuredOn.VALIDATION,
    "dev": MeasuredOn.VALIDATION,
    "eval": MeasuredOn.VALIDATION, "evaluation": MeasuredOn.VALIDATION,
    "test": MeasuredOn.TEST, "testing": MeasuredOn.TEST,
}  # fmt: skip
_SEPARATORS = "/_.: -"
_SOURCE_WORD = re.compile(rf"(?<![^{_SEPARATORS}])({'|'.join(SOURCE_WORDS)})(?:[{_SEPARATORS}]+|$)", re.IGNORECASE)
_WORD = re.compile(r"[a-z]+")
# Lightning's name of a metric that is logged for each step and each epoch.
_INTERVALS = ("_step", "_epoch")
_ACCURACY_WORDS = frozenset((
    "accuracy", "acc", "top", "f", "map", "auc", "auroc", "precision", "recall", "iou", "miou", "dice", "bleu", "rouge",
    "psnr", "ssim", "score", "reward",
))  # fmt: skip
_PROGRESS_WORDS = frozenset({"runtime", "samples", "steps", "seconds", "second", "time", "fps", "flos", "hp"})
_PROGRESS_NAMES = frozenset((*EPOCH_NAMES, *STEP_NAMES))
# Own metrics of a training on the chart of the accuracy, whose legend has room for no more.
MAX_SHARES = 3
_SOURCE_ORDER = (MeasuredOn.TRAINING, MeasuredOn.ONLY, MeasuredOn.VALIDATION, MeasuredOn.TEST)


class Kind(IntEnum):
    """What a chart shows, in the order of the charts."""

    LOSS = 0
    """A loss, an error or another metric that is better when it is lower."""
    ACCURACY = 1
    """A score that is better when it is higher."""
    LR = 2
    OTHER = 3
    PROGRESS = 4
    """How far and how fast the run has got."""


def run_charts(curves: Curves) -> list[Chart]:
    """Return the charts of a run, the most important ones first.

    A training has those of the table, with its own metrics that share the scale of the accuracy, 0 to 1. Without an
    accuracy, its metrics take the place of that chart. The metrics of any other run are grouped.
    """
    names = curves.names
    if not curves.is_own:
        return foreign_charts(curves)
    values = curves.values(name for name in names if name.startswith(METRIC_PREFIX))
    shares = [name for name, part in values.items() if part.is_between(0, 1)][:MAX_SHARES]
    shown = {MeasuredOn.TRAINING, MeasuredOn.VALIDATION, MeasuredOn.ONLY} | (
        {MeasuredOn.EMA} if "ema_val_loss" in names else set()
    )
    charts = []
    for chart in charts_of(Place.RUN):
        if chart.is_optional and names and not chart.metrics.keys() & names:
            continue
        if chart.id == "accuracy" and (instead := charts_without_accuracy(curves)):
            charts += instead
            continue
        metrics = {name: source for name, source in chart.metrics.items() if source in shown}
        metrics |= dict.fromkeys(shares if chart.id == "accuracy" else (), MeasuredOn.ONLY)
        charts.append(replace(chart, metrics=metrics))
    return charts


def charts_without_accuracy(curves: Curves) -> list[Chart]:
    """Return the charts of the metrics of a training without an accuracy: those that are best when low, and when high.
    Empty for other runs."""
    names = [name for name in curves.names if name.startswith(METRIC_PREFIX)]
    if not curves.is_own or not CHARTS["accuracy"].metrics.keys().isdisjoint(curves.names):
        return []
    charts = []
    for title, better in (("errors", Better.LOW), ("scores", Better.HIGH)):
        metrics = {name: MeasuredOn.ONLY for name in names if find_metric(name).better is better}
        if metrics:
            alone = next(iter(metrics)).removeprefix(METRIC_PREFIX) if len(metrics) == 1 else title
            charts.append(Chart(title, alone, metrics, log=better is Better.LOW))
    return charts


def foreign_charts(curves: Curves) -> list[Chart]:
    """Return the charts of the metrics of a run of another program. Those whose steps differ in kind share none."""
    charts, odd_steps = [], curves.odd_steps
    for chart in group_metrics(curves.names):
        odd = {name: source for name, source in chart.metrics.items() if name in odd_steps}
        if odd and len(odd) < len(chart.metrics):
            kept = {name: source for name, source in chart.metrics.items() if name not in odd}
            title = next(iter(odd))
            charts += [replace(chart, metrics=kept), replace(chart, id=title.lower(), title=title, metrics=odd)]
        else:
            charts.append(chart)
    return charts


def compared_charts(runs: Sequence[Curves], charts: Sequence[Chart]) -> list[Chart]:
    """Return the charts that at least one of several runs has values for, then those of metrics of trainings without an
    accuracy and of other foreign metrics."""
    known = [chart for chart in charts if any(run.has(key) for run in runs for key in chart.metrics)]
    instead = [name for run in runs for chart in charts_without_accuracy(run) for name in chart.metrics]
    known += [metric_chart(name) for name in dict.fromkeys(instead)]
    shown = {key for chart in charts for key in chart.metrics}
    foreign = [run for run in runs if not run.is_own]
    names = [name for chart in group_metrics(name for run in foreign for name in run.keys) for name in chart.metrics]
    keys = dict.fromkeys(run.keys[name] for name in names for run in foreign if name in run.keys)
    # That of the validation is a curve of the best epochs, too.
    known += [metric_chart(key, smoothed=True) for key in keys if shown.isdisjoint((key, f"best_{key}"))]
    return known


def group_metrics(names: Iterable[str]) -> list[Chart]:
    """Return the charts of metrics, the most important ones first.

    The first loss, the first accuracy and the learning rate come before all others. The id of a chart is the part that
    the names of its metrics have in common, in lower case.
    """
    return list(_group(tuple(dict.fromkeys(names))))


# Thousands of names take longer to group than a frame.
@lru_cache(maxsize=16)
def _group(names: tuple[str, ...]) -> Sequence[Chart]:
    known = dict.fromkeys(names)
    groups: dict[str, dict[str, MeasuredOn]] = {}
    titles: dict[str, str] = {}
    for name in known:
        title, source = split_name(_without_interval(name, known))
        titles.setdefault(title.lower(), title)
        groups.setdefault(title.lower(), {})[name] = source
    charts = [_make_chart(key, titles[key], metrics) for key, metrics in groups.items()]
    charts.sort(key=lambda chart: (kind_of(chart.id), chart.id != "loss", chart.id))
    firsts = {kind_of(chart.id): chart for chart in reversed(charts)}
    leading = [firsts[kind] for kind in (Kind.LOSS, Kind.ACCURACY, Kind.LR) if kind in firsts]
    return leading + [chart for chart in charts if chart not in leading]


def split_name(name: str) -> tuple[str, MeasuredOn]:
    """Return a name without the word that says what was measured on, and what that word says.

    `train/box_loss` is `box_loss` of the training, `val_loss` is `loss` of the validation.
    """
    match = _SOURCE_WORD.search(name)
    title = _SOURCE_WORD.sub("", name).strip(_SEPARATORS)
    # The only word of a name is the name.
    return (title, SOURCE_WORDS[match[1].lower()]) if match is not None and title else (name, MeasuredOn.ONLY)


def curve_labels(chart: Chart) -> dict[str, str]:
    """Return the label of each metric of a chart: its source, and what else its name has if others have that source."""
    if len(chart.metrics) == 1 and MeasuredOn.ONLY in chart.metrics.values():
        return dict.fromkeys(chart.metrics, "")
    labels = {name: source.value or name.removeprefix(METRIC_PREFIX) for name, source in chart.metrics.items()}
    counts = Counter(labels.values())
    for name, label in labels.items():
        if counts[label] > 1:
            interval = next((suffix[1:] for suffix in _INTERVALS if name.endswith(suffix)), "")
            labels[name] = f"{label} {interval}" if interval else name
    return labels


def kind_of(title: str) -> Kind:
    """Return what a chart shows, by the words of its title."""
    words = set(_WORD.findall(title.lower()))
    if title.lower() in _PROGRESS_NAMES or words & _PROGRESS_WORDS:
        return Kind.PROGRESS
    if better_of_name(title) is Better.LOW:
        return Kind.LOSS
    if "lr" in words or {"learning", "rate"} <= words:
        return Kind.LR
    return Kind.ACCURACY if words & _ACCURACY_WORDS else Kind.OTHER


def _without_interval(name: str, known: Mapping[str, object]) -> str:
    """Return the common part of the names that Lightning gives a metric of each step and of each epoch."""
    base = next((name.removesuffix(suffix) for suffix in _INTERVALS if name.endswith(suffix)), name)
    return base if all(base + suffix in known for suffix in _INTERVALS) else name


def _make_chart(key: str, title: str, metrics: Mapping[str, MeasuredOn]) -> Chart:
    if len(metrics) > 1:
        # Keras and Hugging Face name the loss of the training `loss`.
        metrics = {
            name: MeasuredOn.TRAINING if source is MeasuredOn.ONLY else source for name, source in metrics.items()
        }
    ordered = dict(sorted(metrics.items(), key=lambda item: _SOURCE_ORDER.index(item[1])))
    kind = kind_of(key)
    color = CHARTS["lr"].color if kind is Kind.LR else 1
    marked = {Kind.LOSS: Better.LOW, Kind.ACCURACY: Better.HIGH}.get(kind, Better.NEITHER)
    is_log, is_smoothed = kind is not Kind.ACCURACY, kind is not Kind.LR
    return Chart(key, title, ordered, smoothed=is_smoothed, log=is_log, color=color, marked=marked)
