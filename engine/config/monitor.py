"""Which metric of the validation `run.monitor` names, and which of its values are better.

`engine.runs.monitor` reads it from an epoch, and `engine.train.loop` computes it. The metrics of `CLASS_METRICS` are
computed from the confusion counts, so that they need no user code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from engine.base.errors import did_you_mean
from engine.config.tasks import CLASS_METRICS, Mode, task_facts

if TYPE_CHECKING:
    from engine.config.schema import Config

DEFAULT_MONITOR = "accuracy"
"""That of runs of earlier versions, which do not name it."""


def task_scores(config: Config) -> Mapping[str, Mode]:
    """Return the metrics that each run of the task has, and whether their maximum or their minimum is best."""
    return {"loss": "min", **task_facts(config).metrics}


def monitored_name(config: Config) -> str:
    """Return the name of the metric that decides which epoch is the best."""
    return task_facts(config).monitor if config.run.monitor == "auto" else config.run.monitor


def monitor_mode(config: Config) -> Mode | None:
    """Return which values of that metric are better; None for one of the user's own whose name decides."""
    mode = config.run.monitor_mode
    return task_scores(config).get(monitored_name(config)) or (None if mode == "auto" else mode)


def class_metrics(config: Config) -> tuple[str, ...]:
    """Return those of `CLASS_METRICS` that a run records: those of `eval.metrics`, and the monitored one."""
    return tuple(name for name in CLASS_METRICS if name in (*config.eval.metrics, config.run.monitor))


def monitor_problem(config: Config, own: Collection[str] = ()) -> str:
    """Return why a run cannot be monitored by `run.monitor`; "" if it can. `own` are the user's own metrics."""
    name, known = monitored_name(config), (*task_scores(config), *own)
    if name in known:
        return ""
    return f"{name!r} is no metric of this run, which has {', '.join(known)}{did_you_mean(name, known)}"
