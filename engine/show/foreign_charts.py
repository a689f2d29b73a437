"""The charts of metrics that are not known in advance: those of training and validation share one, by their names.

`tui.screens.foreign_run` shows them. `engine.show.charts` is the table of the charts of a run of gputrain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum

from engine.foreign.reading import EPOCH_NAMES, STEP_NAMES
from engine.runs.metrics import Better, better_of_name
from engine.show.charts import CHARTS, Chart, Source

# The word of a name that says what a metric was measured on, in lower case.
SOURCE_WORDS = {
    "train": Source.TRAINING, "training": Source.TRAINING,
    "val": Source.VALIDATION, "valid": Source.VALIDATION, "validation": Source.VALIDATION, "dev": Source.VALIDATION,
    "eval": Source.VALIDATION, "evaluation": Source.VALIDATION,
    "test": Source.TEST, "testing": Source.TEST,
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
_SOURCE_ORDER = (Source.TRAINING, Source.ONLY, Source.VALIDATION, Source.TEST)


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


def group_metrics(names: Iterable[str]) -> list[Chart]:
    """Return the charts of metrics, the most important ones first.

    The first loss, the first accuracy and the learning rate come before all others. The id of a chart is the part that
    the names of its metrics have in common, in lower case.
    """
    known = dict.fromkeys(names)
    groups: dict[str, dict[str, Source]] = {}
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


def split_name(name: str) -> tuple[str, Source]:
    """Return a name without the word that says what was measured on, and what that word says.

    `train/box_loss` is `box_loss` of the training, `val_loss` is `loss` of the validation.
    """
    match = _SOURCE_WORD.search(name)
    title = _SOURCE_WORD.sub("", name).strip(_SEPARATORS)
    # The only word of a name is the name.
    return (title, SOURCE_WORDS[match[1].lower()]) if match is not None and title else (name, Source.ONLY)


def curve_labels(chart: Chart) -> dict[str, str]:
    """Return the label of each metric of a chart: its source, and what else its name has if others have that source."""
    labels = {name: source.value for name, source in chart.metrics.items()}
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


def _make_chart(key: str, title: str, metrics: Mapping[str, Source]) -> Chart:
    if len(metrics) > 1:
        # Keras and Hugging Face name the loss of the training `loss`.
        metrics = {name: Source.TRAINING if source is Source.ONLY else source for name, source in metrics.items()}
    ordered = dict(sorted(metrics.items(), key=lambda item: _SOURCE_ORDER.index(item[1])))
    kind = kind_of(key)
    color = CHARTS["lr"].color if kind is Kind.LR else 1
    return Chart(key, title, ordered, smoothed=kind is not Kind.LR, log=kind is not Kind.ACCURACY, color=color)
