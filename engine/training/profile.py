"""Profile training steps on request, on all ranks at the same steps.

`trainer` calls `StepProfiler` between two steps; `gputrain runs profile` and the run screen send the request.
`profile_report` writes the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from engine.distributed.watchdog import Phase
from engine.runs.control import MAX_PROFILE_STEPS
from engine.runs.events import Profiled
from engine.runs.sinks import describe_error
from engine.training.memory import release_free_memory
from engine.training.profile_report import ProfileError, write_profile
from engine.training.rank_state import RankState
from engine.training.step_marks import StepMarks

# The first step with the profiler is slower. It is in the trace, but not in the figures.
WARMUP_STEPS = 1


class StepProfiler:
    """Takes the profiles that all ranks agreed on. All ranks call it at the same steps.

    `clocks_stopped` excludes work between two steps from the throughput. A run without a folder takes no profile.
    """

    def __init__(self, state: RankState, clocks_stopped: Callable[[], AbstractContextManager[None]]) -> None:
        self._state, self._clocks_stopped = state, clocks_stopped
        self._profiler: profile | None = None
        """What records the steps; None if no profile is being taken."""
        self._marks = StepMarks(state.device)
        self._problem = ""
        """Why the profiler does not work. It is reported later, because all ranks must take part in what follows."""
        self._agreed_steps = 0
        self.served_steps = 0
        """Sum of the steps of all requests that have been answered, see `RequestCounters.profile_steps`."""

    @property
    def _wanted(self) -> int:
        return min(self._agreed_steps - self.served_steps, MAX_PROFILE_STEPS)

    def advance(self, agreed_steps: int) -> None:
        """Begin or continue a profile between two training steps. Call while `served_steps` differs from these."""
        if self._profiler is None:
            self._agreed_steps = agreed_steps
            with self._clocks_stopped():
                self._start()
        elif self._marks.count >= WARMUP_STEPS + self._wanted:
            self._finish("")
            # Requests that came in the meantime are answered by this profile.
            self.served_steps = agreed_steps

    def interrupt(self, reason: str, *, is_last: bool = False) -> None:
        """End the profile in progress, if there is one, because of what follows the latest step.

        One without a step begins again after a pause, and in the next epoch, but not after the last step."""
        if self._profiler is None:
            return
        if self._marks.count <= WARMUP_STEPS and not is_last:
            self._stop(self._profiler)
            return
        self._finish("" if self._marks.count >= WARMUP_STEPS + self._wanted else reason)
        self.served_steps = self._agreed_steps

    def _start(self) -> None:
        self._state.enter_phase(Phase.PROFILE)
        # Otherwise the profiler writes lines for its own developers to stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # As torch.profiler does for CUDA graphs, which crash if CUPTI is removed and comes back.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        # Instead of torch.profiler.profile, which imports torch._inductor: that takes seconds and 100 MB.
        use_device = "cuda" if self._state.device.type == "cuda" else None
        self._profiler, self._problem = profile(use_kineto=True, use_device=use_device), ""
        try:
            self._profiler.__enter__()
        except Exception as error:
            self._problem = describe_error(error)
        self._state.timer.marks = self._marks = StepMarks(self._state.device)

    def _stop(self, profiler: profile) -> None:
        self._state.timer.marks = self._profiler = None
        if not self._problem:
            try:
                profiler.__exit__(None, None, None)
            except Exception as error:
                self._problem = describe_error(error)

    def _finish(self, note: str) -> None:
        """Stop the profiler, write the profile and report it. `note` says why it has fewer steps than requested."""
        profiler, position = self._profiler, self._state.position
        steps, folder = max(self._marks.count - WARMUP_STEPS, 0), ""
        try:
            with self._clocks_stopped():
                if self._state.device.type == "cuda":
                    torch.cuda.synchronize(self._state.device)
                assert profiler is not None  # noqa: S101 (for mypy)
                self._stop(profiler)
                if not steps:
                    raise ProfileError(note, code="too-small")
                recorded = self._problem or (profiler, self._marks.parts(), WARMUP_STEPS)
                folder = write_profile(self._state, recorded, self._wanted, note)
                release_free_memory()
        except ProfileError as error:
            steps, note = 0, str(error)
        step = position.step - max(steps - 1, 0)
        event = Profiled(step=step, epoch=position.epoch, steps=steps, folder=folder, message=note)
        if dist.get_rank() == 0:
            self._state.channel.send(event)
