"""The table of charts: which curves each one has, where it is shown, and how it is drawn.

The screens (`tui.charts`), and the pages and figures of `gputrain report` (`engine.report`) take their charts from
`CHARTS`. A chart of one metric has the label of that metric in `engine.runs.metrics`, without `best`. To add a chart,
add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto

from engine.runs.metrics import NO_METRICS, Better, Unit, find_metric


class Source(Enum):
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
    PREVIEW = auto()
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
    metrics: Mapping[str, Source]
    smoothed: bool = False
    """Whether its curves have a value for each step, and are averaged over steps on demand."""
    log: bool = True
    """Whether it may have a log scale, which would hide the differences of shares near 1."""
    from_zero: bool = False
    """Whether its y axis begins at zero in a report."""
    color: int = 1
    """Number of the color of a chart of one curve."""
    places: Place = Place.PLOT

    def is_smoothed(self, key: str) -> bool:
        """Whether a curve is averaged over steps: the validation has one value for each epoch."""
        return self.smoothed and self.metrics[key] in (Source.TRAINING, Source.ONLY)


def metric_chart(
    key: str,
    *,
    smoothed: bool = False,
    from_zero: bool = False,
    color: int = 1,
    places: Place = Place.PLOT,
    directions: Mapping[str, Better] = NO_METRICS,
) -> Chart:
    """Return the chart of one metric, also of the user's own one `metrics.NAME`, whose direction may be stored."""
    metric = find_metric(key, directions)
    is_share = metric.unit is Unit.SHARE or (metric.unit is Unit.SCORE and metric.better is Better.HIGH)
    # A curve has the values of all epochs, also that of the metric by which the best epoch is chosen.
    title = metric.label.removeprefix("best ").removeprefix("lowest ") if metric.epoch is not None else metric.label
    return Chart(key, title, {key: Source.ONLY}, smoothed, not is_share, from_zero, color, places)


_REPORTS = Place.REPORT_OF_ONE | Place.REPORT_OF_SEVERAL
_ROWS = (
    Chart(
        "loss", "loss",
        {"train_loss": Source.TRAINING, "val_loss": Source.VALIDATION, "ema_val_loss": Source.EMA},
        smoothed=True, places=Place.RUN | Place.PREVIEW | Place.REPORT_OF_ONE | Place.PLOT,
    ),
    Chart(
        "accuracy", "accuracy",
        {
            "train_accuracy": Source.TRAINING, "val_accuracy": Source.VALIDATION, "ema_val_accuracy": Source.EMA,
            "val_top5": Source.TOP5,
        },
        log=False, places=Place.RUN | Place.PREVIEW | Place.REPORT_OF_ONE,
    ),
    metric_chart("train_loss", smoothed=True, places=Place.COMPARE | Place.REPORT_OF_SEVERAL),
    metric_chart("best_val_accuracy", places=Place.COMPARE | Place.REPORT_OF_SEVERAL),
    metric_chart("best_val_loss", places=Place.COMPARE | Place.REPORT_OF_SEVERAL),
    metric_chart("lr", from_zero=True, color=3, places=Place.RUN | Place.COMPARE | _REPORTS),
    metric_chart("grad_norm", smoothed=True, color=5, places=Place.RUN | Place.COMPARE),
    metric_chart("images_per_second", from_zero=True, places=_REPORTS),
)  # fmt: skip
CHARTS: Mapping[str, Chart] = {chart.id: chart for chart in _ROWS}


def charts_of(place: Place) -> tuple[Chart, ...]:
    """Return the charts of a place, in the order of their importance."""
    return tuple(chart for chart in CHARTS.values() if place in chart.places)


def find_chart(key: str, directions: Mapping[str, Better] = NO_METRICS) -> Chart:
    """Return a chart of the table by its id, or the chart of any other metric."""
    return CHARTS.get(key) or metric_chart(key, directions=directions)
