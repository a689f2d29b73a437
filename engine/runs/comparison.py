"""Compare runs: the config keys that differ, key figures, and groups of runs that differ in the seed alone.

`gputrain compare` prints a `Comparison`, and `tui.screens.compare` shows it beside the curves.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from engine.config.differences import SEED_KEY, KeyDifference, differing_keys, flat_values, seed_group_key
from engine.config.yaml_io import MAX_CONFIG_BYTES, parse_yaml
from engine.runs.events import GpuEvent, RunStarted, StepEvent
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History
from engine.runs.journal import JournalReader, event_type, from_line
from engine.utils.codec import or_none
from engine.utils.errors import Problem, UsageError
from engine.utils.files import read_bytes
from engine.utils.text import format_duration

COMPARISON_FORMAT = 1
# Each run has a letter of its own.
MAX_RUNS = 16
# The events of most lines, which no figure needs.
SKIPPED_EVENTS = (StepEvent, GpuEvent)
DATASETS_WITHOUT_FILES = {"digits", "fake"}


@dataclass(frozen=True)
class Figure:
    """A key figure: its field of `RunFigures`, its label, and whether a `high` or a `low` value is better."""

    name: str
    label: str
    better: str = ""


FIGURES = (
    Figure("best_val_accuracy", "best accuracy", "high"),
    Figure("best_epoch", "best epoch"),
    Figure("val_loss", "lowest val loss", "low"),
    Figure("train_loss", "last train loss", "low"),
    Figure("epochs", "epochs"),
    Figure("seconds", "seconds", "low"),
    Figure("images_per_second", "images/s", "high"),
    Figure("gpus", "GPUs"),
    Figure("ranks", "ranks"),
    Figure("global_batch", "global batch"),
)


@dataclass(frozen=True)
class RunFigures:
    """Key figures of one run; None if unknown."""

    best_val_accuracy: float | None = None
    """Validation accuracy of the best epoch, 0 to 1, of the EMA weights if there are any."""
    best_epoch: int | None = None
    val_loss: float | None = None
    """Lowest validation loss of all epochs, of the EMA weights if there are any."""
    train_loss: float | None = None
    """Mean training loss of the last epoch."""
    epochs: int | None = None
    """Completed epochs."""
    seconds: float | None = None
    """Duration of all sessions together."""
    images_per_second: float | None = None
    """Median training throughput of the epochs, over all ranks."""
    gpus: int | None = None
    """Number of different GPUs; 0 on the CPU."""
    ranks: int | None = None
    global_batch: int | None = None
    """Images per step over all ranks."""


@dataclass(frozen=True)
class ComparedRun:
    """One run: flat config (None if unreadable), figures, and why its files cannot be read."""

    name: str
    folder: str
    state: str
    config: Mapping[str, Any] | None
    figures: RunFigures
    dataset: tuple[Any, ...] = ()
    """Training images, validation images and classes; empty before the start."""
    problem: str | None = None


@dataclass(frozen=True)
class Spread:
    """Mean of the known values of a group, their sample standard deviation (n - 1; None for one value), and number."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Column:
    """What a table shows side by side: one run, or a group of runs that differ in the seed alone. `runs` are indices
    into `Comparison.runs`."""

    runs: tuple[int, ...]

    @property
    def is_group(self) -> bool:
        return len(self.runs) > 1


@dataclass(frozen=True)
class Comparison:
    """Runs, the config keys that differ, the groups that differ in the seed alone, and what the reader should know."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[KeyDifference, ...]
    seed_groups: tuple[tuple[int, ...], ...]
    notes: tuple[Problem, ...]

    def columns(self, *, grouped: bool) -> list[Column]:
        """Return a column for each run, or for each group and each other run, in the order of their first runs."""
        groups = {group[0]: group for group in self.seed_groups} if grouped else {}
        members = {run for group in groups.values() for run in group}
        return [Column(groups.get(run, (run,))) for run in range(len(self.runs)) if run in groups or run not in members]

    def figure(self, column: Column, name: str) -> Spread | None:
        """Return the mean and spread of a figure over the runs of a column; None if it is unknown."""
        return spread(getattr(self.runs[run].figures, name) for run in column.runs)

    def best_columns(self, columns: Sequence[Column], figure: Figure) -> set[int]:
        """Return the indices of the columns with the best value. Empty if all are equal, or fewer than two are known.

        Durations compare only between runs that have finished.
        """
        values: dict[int, float] = {}
        for index, column in enumerate(columns):
            finished = all(self.runs[run].state == RunState.FINISHED for run in column.runs)
            value = self.figure(column, figure.name)
            if value is not None and (finished or figure.name != "seconds"):
                values[index] = value.mean
        if not figure.better or len(set(values.values())) < 2:
            return set()
        best = (max if figure.better == "high" else min)(values.values())
        return {index for index, value in values.items() if value == best}

    def to_dict(self, baseline: int | None = None) -> dict[str, object]:
        """Return the comparison as JSON values, with differences from the run `baseline` if there is one."""
        columns = self.columns(grouped=False)
        best = {figure.name: sorted(self.best_columns(columns, figure)) for figure in FIGURES if figure.better}
        runs: list[dict[str, object]] = []
        for run in self.runs:
            entry: dict[str, object] = {"name": run.name, "folder": run.folder, "state": run.state}
            entry |= {"figures": asdict(run.figures), "problem": run.problem}
            if baseline is not None:
                entry["difference"] = figure_differences(run.figures, self.runs[baseline].figures)
            runs.append(entry)
        return {
            "format": COMPARISON_FORMAT,
            "runs": runs,
            "baseline": None if baseline is None else self.runs[baseline].name,
            "config": {difference.key: list(difference.values) for difference in self.differences},
            "best": best,
            "seed_groups": [
                {"runs": list(group), "figures": self._group_figures(Column(group))} for group in self.seed_groups
            ],
            "notes": list(map(str, self.notes)),
        }

    def _group_figures(self, group: Column) -> dict[str, object]:
        values = {figure.name: self.figure(group, figure.name) for figure in FIGURES}
        return {name: None if value is None else asdict(value) for name, value in values.items()}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the mean and spread of the known values; None if there is none."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), deviation, len(known))


def spread_text(figure: Figure, value: Spread) -> str:
    """Format a figure; of a group the mean and the standard deviation."""
    text = number_text(figure, value.mean)
    return text if not value.deviation else f"{text} ±{number_text(figure, value.deviation)}"


def number_text(figure: Figure, value: float) -> str:
    """Format a number of a figure, with the digits that people compare."""
    if figure.name == "seconds":
        return format_duration(value) if value >= 10 else f"{value:.1f}s"
    if figure.name == "images_per_second":
        return f"{value:,.0f}"
    if figure.name in ("best_val_accuracy", "val_loss", "train_loss"):
        return f"{value:.4f}" if value < 1e5 else f"{value:.3g}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def figure_differences(figures: RunFigures, baseline: RunFigures) -> dict[str, float | None]:
    """Return each figure minus that of the baseline; None if one of them is unknown."""
    differences: dict[str, float | None] = {}
    for part in fields(RunFigures):
        value, reference = getattr(figures, part.name), getattr(baseline, part.name)
        differences[part.name] = None if value is None or reference is None else value - reference
    return differences


def compare_runs(runs: Sequence[ComparedRun]) -> Comparison:
    """Compare runs that have been read. Raises UsageError as `require_comparable` does."""
    require_comparable(len(runs))
    differences = differing_keys([run.config for run in runs])
    notes = [Problem(run.name, run.problem, code="damaged") for run in runs if run.problem is not None]
    if _datasets_differ(runs, {difference.key for difference in differences}):
        reason = "The runs train on different datasets, so their accuracies and losses do not compare"
        notes.insert(0, Problem("", reason, code="not-comparable"))
    return Comparison(tuple(runs), tuple(differences), _seed_groups(runs), tuple(notes))


def _datasets_differ(runs: Sequence[ComparedRun], keys: set[str]) -> bool:
    names = {str(run.config["data.dataset"]) for run in runs if run.config is not None}
    sizes = {run.dataset for run in runs if run.dataset}
    paths_differ = not keys.isdisjoint(("data.path", "data.val_path"))
    return len(names) > 1 or len(sizes) > 1 or (paths_differ and not names <= DATASETS_WITHOUT_FILES)


def require_comparable(count: int) -> None:
    """Raise UsageError if this number of runs cannot be compared."""
    if count > MAX_RUNS:
        raise UsageError.one("compare", f"takes at most {MAX_RUNS} runs, not {count}; choose fewer", code="too-many")
    if count == 0:
        raise UsageError.one("compare", "needs at least one run", code="missing-value")


def _seed_groups(runs: Sequence[ComparedRun]) -> tuple[tuple[int, ...], ...]:
    """Return the runs, by index, that differ in the seed alone. A group has at least two seeds."""
    alike: dict[object, list[int]] = {}
    for index, run in enumerate(runs):
        if run.config is not None:
            size = (run.figures.ranks, run.figures.global_batch, run.dataset)
            alike.setdefault((seed_group_key(run.config), size), []).append(index)
    seeds = [None if run.config is None else str(run.config[SEED_KEY]) for run in runs]
    return tuple(tuple(group) for group in alike.values() if len({seeds[run] for run in group}) > 1)


def read_run(folder: RunFolder) -> ComparedRun:
    """Read one run for a comparison: its config, and the lines of its journal that the figures need."""
    reader, history = JournalReader(folder.journal), History()
    scan_history(reader, history)
    return describe_run(folder, history, read_flat_config(folder.config), reader.problem)


def describe_run(
    folder: RunFolder, history: History, stored: tuple[dict[str, Any] | None, str | None], problem: str | None
) -> ComparedRun:
    """Return what a comparison needs of a run: of the history of its journal, its config as `read_flat_config` returns
    it, and why the journal cannot be read."""
    config, config_problem = stored
    started = history.started
    dataset = () if started is None else (started.train_images, started.val_images, started.classes)
    return ComparedRun(
        folder.name,
        str(folder.path),
        str(folder.state(history)),
        config,
        run_figures(history),
        dataset,
        config_problem or problem,
    )


def read_flat_config(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return the stored config as flat values, or why it cannot be read, as a clause."""
    try:
        stored = parse_yaml(read_bytes(path, MAX_CONFIG_BYTES).decode(errors="replace"))
    except OSError as error:
        return None, f"{path.name} cannot be read: {error.strerror}"
    except (yaml.YAMLError, ValueError, RecursionError):
        return None, f"{path.name} is not valid YAML"
    if not isinstance(stored, dict):
        return None, f"{path.name} has no sections"
    return flat_values(stored), None


def run_figures(history: History) -> RunFigures:
    """Return the figures of a run from its history."""
    summary, started = history.summary(), history.started
    if started is None:
        return RunFigures()
    losses = [epoch.selection_loss for epoch in history.epochs]
    return RunFigures(
        best_val_accuracy=or_none(summary.best_val_accuracy),
        best_epoch=or_none(summary.best_epoch),
        val_loss=min((loss for loss in losses if loss is not None), default=None),
        train_loss=or_none(summary.train_loss),
        epochs=summary.epochs,
        seconds=summary.seconds,
        images_per_second=or_none(summary.images_per_second),
        gpus=len(set(started.devices) - {"cpu"}),
        ranks=started.world_size,
        global_batch=started.global_batch,
    )


def scan_history(reader: JournalReader, history: History) -> None:
    """Add the new events of a journal, but not its steps and GPU samples, which are most of the lines.

    The last of them before each session and at the end is added: it is the end of a session that crashed.
    """
    skipped = b""
    for line in reader.poll_lines():
        kind = event_type(line)
        if kind in SKIPPED_EVENTS:
            skipped = line
        elif kind is not None:
            if skipped and issubclass(kind, RunStarted) and (last := from_line(skipped)) is not None:
                history.add(last)
            skipped = b""
            if (event := reader.parse(line)) is not None:
                history.add(event)
    if skipped and (last := from_line(skipped)) is not None:
        history.add(last)
