"""The registry of metrics: what each key means, how it is shown, and how it is read from a record and from an epoch.

The list of runs, `--sort`, `--columns`, comparisons, reports, plots, sweeps, sync and the screens take their rows from
`METRICS`, so that a key is the same number everywhere. They look a metric up when they need it. The user's own metrics
have a row at run time, see `own_metric`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from engine.base.codec import or_none
from engine.base.units import format_count, format_duration, format_lr, format_number, format_rate, format_score

if TYPE_CHECKING:
    from engine.runs.events import EpochEvent, FinalTest, RunStarted
    from engine.runs.history import History
    from engine.runs.run_record import RunRecord

METRIC_PREFIX, BEST_PREFIX = "metrics.", "best_metrics."
"""What the keys of the user's own metrics begin with: of the last epoch, and of the best one."""
LOWEST_PREFIX, HIGHEST_PREFIX = "lowest_metrics.", "highest_metrics."
ODD_PREFIX = "odd_step."
"""Before the key of a metric of another program whose last value is not finite: the first step of those."""
"""What a record has in place of the best one, because the user may change which values are better."""
OWN_GROUPS = ("metrics", "lowest_metrics", "highest_metrics")
# A damaged journal may claim any number.
MAX_COUNT = 1 << 53
# A metric whose name contains one of these words is better when it is lower.
_LOW_WORDS = frozenset((
    "loss", "losses", "logloss", "entropy", "crossentropy", "error", "errors", "err", "eer", "mae", "mse", "rmse",
    "mape", "smape", "wer", "cer", "nll", "ppl", "perplexity", "bits", "bpb", "bpc", "bpd", "brier", "ece", "fid",
    "latency",
))  # fmt: skip
# A foreign metric with one of these words in its name is better when it is higher, any other one neither.
_HIGH_WORDS = frozenset((
    "accuracy", "acc", "top", "f", "fbeta", "auc", "auroc", "precision", "recall", "ap", "map", "iou", "miou", "dice",
    "score", "bleu", "rouge", "meteor", "psnr", "ssim", "reward", "return",
))  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Better(StrEnum):
    """Which values of a metric are better."""

    HIGH = "high"
    LOW = "low"
    NEITHER = ""


class Taken(StrEnum):
    """How the number of a run is taken from the values that a metric has during training."""

    LAST = "last"
    """Of the last epoch."""
    BEST = "best"
    """Of the best epoch, see `Metric.best_of`."""
    LOWEST = "lowest"
    """The least one of all epochs."""
    HIGHEST = "highest"
    """The greatest one of all epochs."""
    MEDIAN = "median"
    """Median of all epochs."""
    SUM = "sum"
    """Sum of all epochs, or total of all sessions."""
    NOW = "now"
    """At the latest step."""
    NEVER = "never"
    """A record has no value of it. It is only a curve."""


_TAKE: dict[Taken, Callable[[list[float]], float]] = {
    Taken.LOWEST: min, Taken.HIGHEST: max, Taken.MEDIAN: statistics.median, Taken.SUM: sum,
}  # fmt: skip


class Unit(Enum):
    """What a metric measures, which decides how it is shown."""

    SCORE = ""
    """A loss, an accuracy or another score, shown with four digits."""
    SHARE = "share"
    """A share from 0 to 1, shown with four digits."""
    RATE = "images/s"
    SECONDS = "s"
    COUNT = "count"
    LR = "lr"
    NUMBER = "number"
    """A number of any size, shown with four significant digits."""


@dataclass(frozen=True)
class Metric:
    """One metric of a run. `epoch` and `run` return None if the value is unknown or not finite.

    `label` is its name in lists, tables, pages and charts, and `description` what it means. Without `epoch`, it has no
    curve over the epochs. The number of a run is `taken` from the values of `epoch`, unless `run` returns it.
    """

    key: str
    label: str
    description: str
    unit: Unit
    better: Better
    taken: Taken
    epoch: Callable[[EpochEvent], float | None] | None = None
    run: Callable[[History], float | None] | None = None
    source: str = ""
    """Key of its number in `RunRecord.values`, if it is not `key`."""
    min_classes: int = 0
    """Among fewer classes it says nothing: the top-5 accuracy of five is 1."""
    is_of_step: bool = False
    """Whether it is a quantity of a step, see `STEP_QUANTITIES`."""

    @property
    def is_recorded(self) -> bool:
        """Whether a record has a value of it. Else, it is only a curve."""
        return self.taken is not Taken.NEVER

    def of_run(self, record: RunRecord) -> float | None:
        """Return the value of a run; None if it is unknown or not finite."""
        if self.min_classes and record.classes is not None and record.classes < self.min_classes:
            return None
        return record.values.get(self.source or self.key)

    def of_epoch(self, epoch: EpochEvent) -> float | None:
        """Return the value of an epoch; None if it is unknown or not finite."""
        return None if self.epoch is None else self.epoch(epoch)

    def of_history(self, history: History, best: EpochEvent | None) -> float | None:
        """Return the number of a run with this history and this best epoch; None if it is unknown or not finite."""
        if self.run is not None:
            return self.run(history)
        if self.is_of_step:
            return None if history.latest_step is None else history.latest_step.quantities.get(self.key)
        if self.taken in _TAKE:
            known = [value for epoch in history.epochs if (value := self.of_epoch(epoch)) is not None]
            value = _TAKE[self.taken](known) if known else None
            return round(value, 1) if value is not None and self.unit is Unit.RATE else value
        epoch = best if self.taken is Taken.BEST else history.epochs[-1] if history.epochs else None
        return None if epoch is None else self.of_epoch(epoch)

    def merit(self, value: float | None) -> float:
        """Return a number that is larger for a better value, and the least for an unknown one."""
        return -math.inf if value is None else -value if self.better is Better.LOW else value

    def rank(self, value: float | None, val_loss: float | None, order: float) -> tuple[float, float, float]:
        """Return what is larger for the better one of two results: that with the better value, of equals the one with
        the lower validation loss, then that with the larger `order`."""
        return self.merit(value), -math.inf if val_loss is None else -val_loss, order

    def best_of(self, epochs: Iterable[EpochEvent]) -> EpochEvent | None:
        """Return the best epoch, of equal ones the later one; None if no epoch has a value."""
        known = (epoch for epoch in epochs if self.of_epoch(epoch) is not None)
        return max(
            known, key=lambda epoch: self.rank(self.of_epoch(epoch), epoch.selected("loss"), epoch.epoch), default=None
        )


Part = TypeVar("Part")


def _of(
    part: Callable[[History], Part | None], number: Callable[[Part], float | None]
) -> Callable[[History], float | None]:
    """Return the function that takes a number of a part of the history; None without that part."""

    def take(history: History) -> float | None:
        return None if (found := part(history)) is None else number(found)

    return take


def _rows() -> Iterable[Metric]:
    high, low, neither = Better.HIGH, Better.LOW, Better.NEITHER
    last, best, now, total, never = Taken.LAST, Taken.BEST, Taken.NOW, Taken.SUM, Taken.NEVER
    score, share, count = Unit.SCORE, Unit.SHARE, Unit.COUNT
    started: Callable[[History], RunStarted | None] = attrgetter("started")
    best_epoch: Callable[[History], EpochEvent | None] = attrgetter("best")
    tested: Callable[[History], FinalTest | None] = attrgetter("tested")
    return (
        Metric("best_val_accuracy", "best val acc", "validation accuracy of the best epoch, of the EMA weights if any",
               score, high, best, lambda epoch: epoch.selected("accuracy")),
        Metric("best_epoch", "best epoch", "epoch with the best value of run.monitor, of equals the lowest loss",
               count, neither, best, run=_of(best_epoch, lambda epoch: epoch.epoch)),
        Metric("best_epoch_val_loss", "val loss at best", "validation loss of the best epoch, of the EMA weights"
               " if any", score, low, best, run=_of(best_epoch, lambda epoch: epoch.selected("loss"))),
        Metric("best_val_loss", "lowest val loss", "lowest validation loss of all epochs, of the EMA weights if any",
               score, low, Taken.LOWEST, lambda epoch: epoch.selected("loss")),
        Metric("test_accuracy", "test acc", "accuracy on the test images, evaluated once with the best epoch's weights",
               score, high, best, run=_of(tested, lambda test: test.accuracy)),
        Metric("test_loss", "test loss", "loss on the test images, evaluated once with the best epoch's weights",
               score, low, best, run=_of(tested, lambda test: test.loss)),
        Metric("val_accuracy", "val acc", "validation accuracy of the last epoch", score, high, last,
               lambda epoch: epoch.val_accuracy),
        Metric("val_loss", "val loss", "validation loss of the last epoch", score, low, last,
               lambda epoch: epoch.val_loss),
        Metric("train_accuracy", "train acc", "training accuracy of the last epoch", score, high, last,
               lambda epoch: epoch.train_accuracy),
        Metric("train_loss", "train loss", "training loss of the last epoch", score, low, last,
               lambda epoch: epoch.train_loss),
        Metric("epochs", "epochs", "completed epochs", count, neither, total,
               run=lambda run: None if run.command else run.epochs[-1].epoch if run.epochs else 0),
        Metric("total_epochs", "planned epochs", "epochs that the run trains for", count, neither, total,
               run=_of(started, lambda start: start.epochs)),
        Metric("step", "step", "completed optimizer steps", count, neither, now,
               run=lambda run: None if run.command else run.steps_done),
        Metric("steps", "planned steps", "optimizer steps that the run trains for", count, neither, total,
               run=_of(started, lambda start: min(start.epochs * start.steps_per_epoch, MAX_COUNT))),
        Metric("seconds", "duration", "duration of all sessions without pauses, or of an epoch", Unit.SECONDS, low,
               total, lambda epoch: epoch.seconds, lambda run: round(run.total_seconds, 3) or None),
        Metric("eta_seconds", "eta", "estimated time to the end of the run", Unit.SECONDS, low, now,
               run=lambda run: run.eta_s if run.trains else None),
        Metric("images_per_second", "images/s", "median training throughput of the epochs over all ranks", Unit.RATE,
               high, Taken.MEDIAN, lambda epoch: epoch.images_per_second or None),
        Metric("rate_now", "images/s now", "latest training throughput over all ranks", Unit.RATE, high, now,
               run=lambda run: run.rate_now),
        Metric("data_wait", "data wait", "share of the training time of the last epoch that the ranks waited for data",
               share, low, last, lambda epoch: or_none(epoch.data_wait), lambda run: run.data_wait),
        Metric("mfu", "MFU", "model FLOPs utilization of the last epoch", share, high, last, run=lambda run: run.mfu),
        Metric("grad_norm", "grad norm", "latest L2 norm of the gradient, before clipping", Unit.NUMBER, neither, now,
               is_of_step=True),
        Metric("gpus", "GPUs", "number of GPUs, 0 on the CPU", count, neither, last,
               run=lambda run: len(set(start.devices) - {"cpu"}) if (start := run.started or run.command) else None),
        Metric("ranks", "ranks", "number of ranks on all nodes", count, neither, last,
               run=_of(started, lambda start: start.world_size)),
        Metric("global_batch", "global batch", "images per step over all ranks", count, neither, last,
               run=_of(started, lambda start: start.global_batch)),
        Metric("parameters", "parameters", "number of model parameters", count, neither, last,
               run=_of(started, lambda start: start.parameters)),
        Metric("queue_place", "queue place", "place in the queue while the run waits for GPUs only", count, low, now,
               run=_of(lambda run: run.waiting, lambda waiting: or_none(waiting.place))),
        Metric("val_top5", "val top-5", "validation top-5 accuracy of the last epoch", score, high, last,
               lambda epoch: epoch.val_top5, min_classes=6),
        Metric("ema_val_loss", "EMA val loss", "validation loss of the EMA weights", score, low, never,
               lambda epoch: None if epoch.ema is None else epoch.ema.loss),
        Metric("ema_val_accuracy", "EMA val acc", "validation accuracy of the EMA weights", score, high, never,
               lambda epoch: None if epoch.ema is None else epoch.ema.accuracy),
        Metric("ema_val_top5", "EMA val top-5", "validation top-5 accuracy of the EMA weights", score, high, never,
               lambda epoch: None if epoch.ema is None else epoch.ema.top5),
        Metric("lr", "lr", "learning rate at the end of the epoch", Unit.LR, neither, never,
               lambda epoch: epoch.lr),
        Metric("skipped_steps", "skipped steps", "steps skipped because a loss or gradient was not finite", count, low,
               never, lambda epoch: epoch.skipped_steps),
        Metric("skipped_images", "skipped images", "unreadable images of the epoch", count, low, never,
               lambda epoch: epoch.skipped_images),
    )  # fmt: skip


NO_METRICS: Mapping[str, Better] = MappingProxyType({})
"""The directions of no metrics of the user's own."""
METRICS: dict[str, Metric] = {row.key: row for row in _rows()}
STEP_QUANTITIES = tuple(row.key for row in METRICS.values() if row.is_of_step)
"""Quantities of a step beside its loss and its learning rate: fields of `StepEvent`, and curves. The training loop
hands their values to its `TrainingLog`."""


def values_of(history: History) -> dict[str, float | None]:
    """Return the numbers of a run, `RunRecord.values`: of the metrics of the registry, and of the user's own ones."""
    best = history.best
    numbers = {row.key: row.of_history(history, best) for row in METRICS.values() if row.is_recorded}
    values: dict[str, float | None] = {key: value for key, value in numbers.items() if value is not None}
    if best is not None:
        values["best"] = history.monitor.of_epoch(best)
    known: dict[str, list[float]] = {}
    for epoch in history.epochs:
        for name, number in epoch.metrics.items():
            if number is not None:
                known.setdefault(name, []).append(number)
    last = history.epochs[-1].metrics if history.epochs else {}
    values |= {METRIC_PREFIX + name: value for name, value in last.items()}
    values |= {LOWEST_PREFIX + name: min(found) for name, found in known.items()}
    return values | {HIGHEST_PREFIX + name: max(found) for name, found in known.items()}


# What other trainers call a metric of the registry, in lower case, the best name first. Names that may mean something
# else are missing: a `loss` alone can be of any images, and a `grad_norm` before or after clipping.
FOREIGN_NAMES: Mapping[str, tuple[str, ...]] = {
    "val_loss": (
        "val_loss", "val/loss", "valid_loss", "valid/loss", "validation_loss", "validation/loss", "eval_loss",
        "eval/loss", "loss/val", "loss/valid", "loss/validation", "loss/eval",
    ),
    "train_loss": ("train_loss", "train/loss", "train_loss_epoch", "training_loss", "loss/train"),
    "val_accuracy": (
        "val_accuracy", "val/accuracy", "val_acc", "val/acc", "valid_accuracy", "valid/accuracy", "valid_acc",
        "validation_accuracy", "validation/accuracy", "eval_accuracy", "eval/accuracy", "eval_acc", "accuracy/val",
        "accuracy/valid", "metrics/accuracy_top1",
    ),
    "train_accuracy": (
        "train_accuracy", "train/accuracy", "train_acc", "train/acc", "train_acc_epoch", "accuracy/train",
    ),
    "lr": ("lr", "learning_rate", "train/learning_rate", "train/lr"),
}  # fmt: skip
# The names of Keras and of Hugging Face's Trainer for training, which count beside a metric of the validation.
_BARE_NAMES = (("loss", "train_loss", "val_loss"), ("accuracy", "train_accuracy", "val_accuracy"))
_KEYS_OF_NAMES = {name: key for key, names in FOREIGN_NAMES.items() for name in names}
SHORT_NAMES: Mapping[str, str] = MappingProxyType({
    "accuracy": "best_val_accuracy",
    "acc": "best_val_accuracy",
    "best_accuracy": "best_val_accuracy",
    "loss": "val_loss",
    "images_s": "images_per_second",
    "throughput": "images_per_second",
    "top5": "val_top5",
    "epoch": "epochs",
    "duration": "seconds",
    "time": "seconds",
    "eta": "eta_seconds",
})  # fmt: skip
"""What people type for a metric of the registry."""


def fold_name(name: str) -> str:
    """Return a name as it is compared: lower case, with underscores for blanks and hyphens."""
    return name.casefold().replace("-", "_").replace(" ", "_")


def find_key(name: str) -> str | None:
    """Return the key in the registry of a metric by its key, a short name, its label, or what other programs call it,
    with `best` before it for the best value; None if there is none."""
    folded = fold_name(name)
    if folded in METRICS or folded in SHORT_NAMES:
        return SHORT_NAMES.get(folded, folded)
    labels = {fold_name(metric.label): key for key, metric in METRICS.items()}
    best = f"best_{_KEYS_OF_NAMES.get(folded.removeprefix('best_'))}"
    return labels.get(folded) or _KEYS_OF_NAMES.get(folded) or (best if best in METRICS else None)


def registry_keys(names: Iterable[str]) -> dict[str, str]:
    """Return the key in the registry of those metrics of a foreign run that have one, by their names in that run.

    `foreign_record.metric_keys` has the keys of all metrics.
    """
    by_key: dict[str, str] = {}
    known = {name.lower(): name for name in sorted(names)}
    for name, key in _KEYS_OF_NAMES.items():
        if name in known:
            by_key.setdefault(key, known[name])
    for name, key, beside in _BARE_NAMES:
        if name in known and beside in by_key:
            by_key.setdefault(key, known[name])
    return {name: key for key, name in by_key.items()}


def own_metric(name: str, *, best: bool = False, better: Better | None = None) -> Metric:
    """Return the row of one of the user's own metrics: that of the last epoch, or the best of all epochs.

    `better` is its direction, by default that of its name.
    """
    direction = better_of_name(name) if better is None else better
    if not best:
        return Metric(
            METRIC_PREFIX + name, name, f"your metric {name} of the last epoch", Unit.SCORE, direction, Taken.LAST,
            lambda epoch: epoch.metrics.get(name),
        )  # fmt: skip
    return Metric(
        BEST_PREFIX + name, f"best {name}", f"your metric {name}, the best of all epochs", Unit.SCORE, direction,
        Taken.BEST, source=(LOWEST_PREFIX if direction is Better.LOW else HIGHEST_PREFIX) + name,
    )  # fmt: skip


def foreign_metric(name: str, *, best: bool = False, better: Better | None = None) -> Metric:
    """Return the row of a metric of a foreign run that has no key in the registry, as `own_metric` does.

    Such a metric can be anything, so it has digits for a number of any size, and a direction if its name has one.
    """
    known = (better_of_name(name) if names_direction(name) else Better.NEITHER) if better is None else better
    return replace(own_metric(name, best=best, better=known), unit=Unit.NUMBER)


def foreign_metrics(name: str, better: Better | None = None) -> list[Metric]:
    """Return what tables show of a metric for `foreign_metric`: the best value if it has a direction, and the last
    one."""
    last = foreign_metric(name, better=better)
    return [last] if last.better is Better.NEITHER else [foreign_metric(name, best=True, better=better), last]


def metric_of_key(key: str) -> Metric:
    """Return the metric that a foreign run has under a key: a row of the registry, or that of `metrics.NAME`."""
    return METRICS[key] if key in METRICS else foreign_metric(key.removeprefix(METRIC_PREFIX))


def find_metric(key: str, directions: Mapping[str, Better] = NO_METRICS) -> Metric:
    """Return a row of the registry, or for `metrics.NAME` that of the user's own metric."""
    name = key.removeprefix(METRIC_PREFIX)
    return METRICS[key] if name == key else own_metric(name, better=directions.get(name))


def better_of_name(name: str) -> Better:
    """Return which values of a metric are better: low ones if a word of its name says so, such as loss or error."""
    return Better.HIGH if _LOW_WORDS.isdisjoint(_words(name)) else Better.LOW


def names_direction(name: str) -> bool:
    """Whether a word of the name says which values of a metric are better; else `better_of_name` assumes high ones."""
    return not (_LOW_WORDS | _HIGH_WORDS).isdisjoint(_words(name))


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}


def own_metrics(records: Iterable[RunRecord], directions: Mapping[str, Better] = NO_METRICS) -> dict[str, Better]:
    """Return the directions of the user's own metrics in records, by name: those of `directions`, else of the name."""
    keys: dict[str, object] = {}
    for record in records:
        keys.update(record.values)
    parts = (key.partition(".") for key in keys)
    names = dict.fromkeys(name for group, _, name in parts if name and group in OWN_GROUPS)
    return {name: directions.get(name) or better_of_name(name) for name in names}


def recorded_metrics(own: Mapping[str, Better]) -> list[Metric]:
    """Return the metrics that a record has a value of: those of METRICS, and `own` ones of the last and best epoch."""
    rows = [row for row in METRICS.values() if row.is_recorded]
    for name, better in own.items():
        rows += [own_metric(name, best=best, better=better) for best in (True, False)]
    return rows


def figures_of(record: RunRecord, directions: Mapping[str, Better] = NO_METRICS) -> list[tuple[Metric, float]]:
    """Return the numbers that a run has, with their metrics. `directions` are those of the user's own metrics."""
    metrics = recorded_metrics(own_metrics([record], directions))
    return [(metric, value) for metric in metrics if (value := metric.of_run(record)) is not None]


def format_known(key: str, value: float | None, unknown: str = "") -> str:
    """Format a value of a metric of the registry; `unknown` stands for None."""
    return unknown if value is None else format_metric(METRICS[key], value)


def format_of_epoch(epoch: EpochEvent, unknown: str, key: str) -> str:
    """Format the value of an epoch of a metric for `find_metric`; `unknown` stands for None."""
    value = (metric := find_metric(key)).of_epoch(epoch)
    return unknown if value is None else format_metric(metric, value)


def format_metric(metric: Metric, value: float) -> str:
    """Format a value of a metric with the digits that people compare."""
    match metric.unit:
        case Unit.SECONDS:
            return format_duration(value) if value >= 10 else f"{value:.1f}s"
        case Unit.RATE:
            return format_rate(value)
        case Unit.SCORE | Unit.SHARE:
            return format_score(value)
        case Unit.LR:
            return format_lr(value)
        case Unit.NUMBER:
            return format_number(value)
    return format_count(value)
