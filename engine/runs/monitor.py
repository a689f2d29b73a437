"""What is best: the metric by which a run chooses its best epoch, as `run.monitor` names it.

The best checkpoint, early stopping and schedule plateau follow it during training. Records name it, so that lists,
reports and messages show the best value of the run by its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.config.monitor import DEFAULT_MONITOR, monitor_mode, monitored_name
from engine.runs.metrics import METRICS, Better, Metric, Taken, Unit, better_of_name, format_metric

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.runs.run_record import RunRecord

_KEYS = {"accuracy": "best_val_accuracy", "loss": "best_val_loss"}
_LABELS = {"top5": "val top-5"}


def monitor_of(name: str, mode: str | None = None) -> Metric:
    """Return the best value of a metric of the validation as a metric of the run. `mode` is max or min; None takes that
    of the name. The EMA weights count if there are any."""
    return METRICS[_KEYS[name]] if name in _KEYS else _other_monitor(name, mode)


@lru_cache(maxsize=64)
def _other_monitor(name: str, mode: str | None) -> Metric:
    better = better_of_name(name) if mode is None else Better.LOW if mode == "min" else Better.HIGH
    label, description = f"best {_LABELS.get(name, name)}", f"{name} of the best epoch, of the EMA weights if any"
    return Metric("best", label, description, Unit.SCORE, better, Taken.BEST, lambda epoch: epoch.selected(name))


def config_monitor(config: Config) -> Metric:
    """Return the metric by which a run with this config chooses its best epoch."""
    return monitor_of(monitored_name(config), monitor_mode(config))


def record_monitor(record: RunRecord) -> Metric:
    """Return the metric by which a run chooses its best epoch. Records of earlier versions name none."""
    return monitor_of(record.monitor or DEFAULT_MONITOR, record.monitor_mode)


def shared_monitor(records: Iterable[RunRecord]) -> Metric | None:
    """Return the metric by which all trainings choose their best epoch; None if they have several."""
    found = {metric.label: metric for record in records if not record.command for metric in [record_monitor(record)]}
    return None if len(found) > 1 else next(iter(found.values()), monitor_of(DEFAULT_MONITOR))


def best_text(record: RunRecord) -> str:
    """Return the best value of a run with its name, such as `best macro_f1 0.912`; "" without one."""
    metric = record_monitor(record)
    value = metric.of_run(record)
    return "" if value is None else f"{metric.label} {format_metric(metric, value)}"
