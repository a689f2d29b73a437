"""Mark the phases of profiled steps, in the trace of torch.profiler and with CUDA events.

`loop.train_step` and `timing.PhaseTimer` call `StepMarks` while `PhaseTimer.marks` is set. Otherwise a step costs
nothing more than reading that attribute.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import torch
from torch.autograd.profiler import record_function

from engine.runs.profile_file import PARTS, Part
from engine.training.profile_timeline import MARK_PREFIX, STEP_MARK, StepParts


class StepMarks:
    """Marks of consecutive steps. A phase lasts to the next `begin` or to the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._step, self._phase = ExitStack(), ExitStack()
        self._events: list[list[tuple[Part, torch.cuda.Event]]] = []
        self.uninterrupted: list[bool] = []
        """For each step, whether the next step follows it at once."""

    @property
    def count(self) -> int:
        """Number of completed steps."""
        return len(self.uninterrupted)

    def begin_step(self, step: int) -> None:
        self._step.enter_context(record_function(f"{STEP_MARK} {step}"))
        self._events.append([])
        self.begin("other")

    def begin(self, phase: Part) -> None:
        self._phase.close()
        self._phase.enter_context(record_function(f"{MARK_PREFIX}{phase}"))
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events[-1].append((phase, event))

    def end_step(self) -> None:
        if self._is_cuda:
            # Marks the end of the last phase.
            self.begin("other")
        self._phase.close()
        self._step.close()
        self.uninterrupted.append(True)

    def interrupt(self) -> None:
        """Let the latest step end before what follows it, such as a checkpoint."""
        if self.uninterrupted:
            self.uninterrupted[-1] = False

    def event_parts(self) -> list[StepParts]:
        """Return the parts of each step in nanoseconds by the CUDA events, for a trace without kernels.

        They include the all-reduce in the backward pass. Call after synchronizing the device.
        """
        result = []
        for index, marks in enumerate(self._events[: self.count]):
            parts: StepParts = dict.fromkeys(PARTS, 0)
            if self.uninterrupted[index] and index + 1 < self.count:
                marks = [*marks, self._events[index + 1][0]]
            for (phase, event), (_, following) in pairwise(marks):
                parts[phase] += round(event.elapsed_time(following) * 1e6)
            result.append(parts)
        return result
