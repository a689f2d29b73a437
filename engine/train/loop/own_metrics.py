"""The metrics of `eval.metrics` beside loss and accuracy: those of the classes, and the user's own, such as AUROC.

One of the user's own is a function of the probabilities (N x classes, float32) and the labels (N, int64) of all
validation images, both CPU tensors in the order of the dataset; with another task than classification of its
predictions and its targets (N x classes, float32). An object with `reset()`, `update(probabilities, labels)` and
`compute()`, such as a metric of torchmetrics, works too. It returns a number, or a dict of numbers. Rank 0 calls it
once per evaluation, so that its value does not depend on the number of ranks. `loop.evaluate` and
`engine.train.inference.evaluate` call this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist

from engine.base.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.config.monitor import class_metrics, monitor_problem
from engine.config.schema import Config
from engine.config.user_code import as_number, describe_value, is_user_code, load_user_function
from engine.config.user_errors import UserCodeError, describe_exception
from engine.train.distributed.collectives import gather_bytes
from engine.train.loop.metrics import Evaluation
from engine.train.loop.tasks.base import Outputs, Task

METRICS_KEY = "eval.metrics"
# Rank 0 holds the probabilities of all images: 200 MB for the validation set of ImageNet.
MAX_GATHERED_BYTES = 1 << 30
# Values in the trial before the run.
MAX_TRIAL_VALUES = 10**7
_NAME = re.compile(r"[^\W\d][\w.@/-]{0,49}")


class OwnMetrics:
    """The metrics of a config, loaded and tried. `bool()` of it is whether there are any of the user's own."""

    def __init__(self, config: Config, task: Task, num_images: int) -> None:
        """Load the metrics, and call each with random probabilities. Raises UsageError with all problems."""
        self._config, self._task, num_classes = config, task, task.num_outputs
        self._metrics: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._class_metrics = class_metrics(config)
        names, problems = tuple(filter(is_user_code, config.eval.metrics)), list[Problem]()
        if (names or task.keeps_outputs) and num_images * num_classes * 4 > MAX_GATHERED_BYTES:
            reason = (
                f"needs the probabilities of {num_images:,} images of {num_classes:,} classes on one rank, which is "
                f"more than {MAX_GATHERED_BYTES >> 30} GiB; evaluate fewer images"
            )
            raise UsageError.one(METRICS_KEY if names else "task.name", reason, code="too-large")
        for name in names:
            with collect_problems(problems):
                self._metrics[name] = self._load(name)
        if not problems and names:
            values = dict.fromkeys(self._class_metrics, 0.0)
            for name in names:
                try:
                    found = self._call(name, _trial_outputs(task))
                    if twice := sorted(values.keys() & found.keys()):
                        problems.append(
                            Problem(METRICS_KEY, f"{name} has the value {twice[0]} of another metric", code="conflict")
                        )
                    values |= found
                except UserCodeError as error:
                    problems.append(Problem(METRICS_KEY, str(error), code=error.code))
            if not problems and (reason := monitor_problem(config, values)):
                problems.append(Problem("run.monitor", reason, code="unknown-value"))
        raise_if_any(problems)

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def add_to(
        self,
        evaluation: Evaluation,
        outputs: Sequence[Outputs],
        warn: Callable[[Problem], None],
        *,
        selects: bool,
        cpu_group: dist.ProcessGroup | None = None,
    ) -> Evaluation:
        """Return an evaluation with the metrics that the run records: `CLASS_METRICS`, and with the `outputs` of all
        images those of the task (`Task.score`, also for `selects`) and the user's own. Other ranks than 0 have none.

        `outputs` are those of this rank. A collective of `cpu_group`, if there is one."""
        means = {name: evaluation.class_means[name] for name in self._class_metrics if name in evaluation.class_means}
        needs_outputs = bool(self) or self._task.keeps_outputs
        gathered = gather_outputs(outputs, self._task, cpu_group) if needs_outputs else None
        if gathered is None:
            return replace(evaluation, own=means)
        scored = self._task.score(evaluation, gathered, selects=selects)
        return replace(scored, own=means | scored.own | self.compute(gathered, warn))

    def compute(self, outputs: Outputs, warn: Callable[[Problem], None]) -> dict[str, float]:
        """Return the values of all metrics; those of a metric that fails are missing, and `warn` is called once."""
        values: dict[str, float] = {}
        for name in self._metrics:
            try:
                values |= self._call(name, outputs)
            except UserCodeError as error:
                if name not in self._warned:
                    self._warned.add(name)
                    warn(Problem(METRICS_KEY, str(error), code=error.code))
        return values

    def _load(self, name: str) -> Any:
        metric = load_user_function(METRICS_KEY, name, self._config.run)
        if _has_state(metric) and not hasattr(metric, "reset"):
            reason = f"{name} has update() and compute(), but no reset(), which is called before each evaluation"
            raise UsageError.one(METRICS_KEY, reason, code="invalid-value")
        return metric

    def _call(self, name: str, outputs: Outputs) -> dict[str, float]:
        """Return the values of a metric by name. Raises UserCodeError."""
        metric, run = self._metrics[name], self._config.run
        # Copies: a metric may change its arguments.
        probabilities, labels = (tensor.clone() for tensor in outputs)
        try:
            if _has_state(metric):
                metric.reset()
                metric.update(probabilities, labels)
                result = metric.compute()
            else:
                result = metric(probabilities, labels)
        except Exception as error:
            reason = describe_exception(error, run.code, run.code_packages)
            raise UserCodeError(
                f"{name} fails with probabilities (N x {self._task.num_outputs}) and labels: {reason}",
                code="user-code-failed",
            ) from error
        numbers, own_name = dict[str, float](), name.rpartition(":")[2].rpartition(".")[2]
        for key, value in (result if isinstance(result, Mapping) else {own_name: result}).items():
            if not isinstance(key, str) or _NAME.fullmatch(key) is None:
                raise UserCodeError(
                    f"{name} returns a value named {key!r:.60}; use 1 to 50 letters, digits and . @ - _ / and begin "
                    "with a letter or _",
                    code="invalid-name",
                )
            if (number := as_number(value)) is None:
                reason = f"{name} returns {describe_value(value)} instead of a number or a dict of numbers"
                raise UserCodeError(reason, code="invalid-value")
            numbers[key] = number
        return numbers


def _has_state(metric: Any) -> bool:
    """Whether a metric collects its images, as those of torchmetrics, instead of being a function."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _trial_outputs(task: Task) -> Outputs:
    """Return random predictions of images of all classes, two of each if they are not too many."""
    num_classes = task.num_outputs
    count = max(min(2 * num_classes, MAX_TRIAL_VALUES // num_classes), 2)
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(count, num_classes, generator=generator).to(task.device)
    return task.activate(logits).cpu(), task.example_targets(count)


def concatenate(outputs: Sequence[Outputs], task: Task) -> Outputs:
    """Return the outputs of several batches as one, on the CPU."""
    if not outputs:
        return torch.zeros(0, task.num_outputs), task.example_targets(0)
    predictions, targets = (torch.cat(parts).cpu() for parts in zip(*outputs, strict=True))
    return predictions, targets


def gather_outputs(outputs: Sequence[Outputs], task: Task, cpu_group: dist.ProcessGroup | None) -> Outputs | None:
    """Return the outputs of all ranks on rank 0, in the order of the dataset; None on other ranks. A collective."""
    own = concatenate(outputs, task)
    if cpu_group is None or dist.get_world_size(cpu_group) == 1:
        return own
    buffer = BytesIO()
    torch.save(own, buffer)
    # Each rank evaluates a contiguous part of the dataset.
    ranks = [torch.load(BytesIO(part), weights_only=True) for part in gather_bytes(buffer.getvalue(), cpu_group)]
    return concatenate(ranks, task) if ranks else None
