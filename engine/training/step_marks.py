"""Mark the phases of profiled steps, in the trace of torch.profiler and by their times.

`loop.train_step` and `timing.PhaseTimer` call `StepMarks` while `PhaseTimer.marks` is set. Otherwise a step costs
nothing more than reading that attribute.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch.autograd.profiler import record_function

from engine.runs.profile_file import PARTS, Part

# Begin of the names of the marks in the trace.
MARK_PREFIX = "gputrain: "


class StepMarks:
    """Marks of steps. A phase lasts to the next `begin` or to the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._step, self._phase = ExitStack(), ExitStack()
        self._marks: list[list[tuple[Part, torch.cuda.Event | float]]] = []
        self.count = 0
        """Number of completed steps."""

    def begin_step(self, step: int) -> None:
        """Begin the step with this global number."""
        self._step.enter_context(record_function(f"{MARK_PREFIX}step {step}"))
        self._marks.append([])
        self.begin("other")

    def begin(self, phase: Part) -> None:
        """End the phase of the step, and begin another one."""
        self._phase.close()
        self._phase.enter_context(record_function(f"{MARK_PREFIX}{phase}"))
        mark: torch.cuda.Event | float = time.perf_counter()
        if self._is_cuda:
            # The host runs ahead: the parts are what the device does.
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks[-1].append((phase, mark))

    def end_step(self) -> None:
        """End the step."""
        # Marks the end of the last phase.
        self.begin("other")
        self._phase.close()
        self._step.close()
        self.count += 1

    def parts(self) -> list[dict[Part, float]]:
        """Return the seconds of each part of each step. Call after synchronizing the device."""
        result = []
        for marks in self._marks[: self.count]:
            parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
            for (phase, mark), (_, following) in pairwise(marks):
                parts[phase] += _seconds_between(mark, following)
            result.append(parts)
        return result


def _seconds_between(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    if isinstance(first, float) or isinstance(second, float):
        return float(second) - float(first)  # type: ignore[arg-type]  # both are
    return float(first.elapsed_time(second)) / 1e3
