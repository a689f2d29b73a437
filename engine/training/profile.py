"""Profile training steps on request, on all ranks at the same steps.

`trainer` calls `StepProfiler` between two steps; `gputrain runs profile` and the run screen send the request.
`profile_report` computes and writes the result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from enum import Enum
from math import ceil

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from engine.distributed.collectives import all_gather_records
from engine.distributed.watchdog import Phase
from engine.runs.control import MAX_PROFILE_STEPS
from engine.runs.events import Profiled
from engine.runs.folder import RunFolder
from engine.training.memory import release_free_memory
from engine.training.profile_report import ProfileError, Recording, write_profile
from engine.training.rank_state import RankState
from engine.training.step_marks import StepMarks
from engine.utils.codec import Count, Record

# Steps that are timed before the profiler is on, to show how much it slows them down.
UNPROFILED_STEPS = 3
# A checkpoint after every step interrupts all attempts to time them.
MAX_UNPROFILED_ATTEMPTS = 3
# An event takes about 2 KB of memory until the profile is written. A step of ResNet-50 on the CPU has about 5,000.
MAX_EVENTS = 100_000
# Batches that the input pipeline prepared while the profiler started would hide how slow it is.
MAX_SETTLE_STEPS = 64


class Interruption(Enum):
    """What happens after a step instead of the next one. The values complete "fewer steps: ..."."""

    CHECKPOINT = "a checkpoint was written"
    PAUSE = "the run was paused"
    EPOCH_END = "the epoch ended"
    STOP = "the run ended"


# Between two steps, a profile in progress is resumed with what came between them.
_Resumed = Interruption | None


class Calibration(Record, frozen=True, kw_only=True):
    """What a rank found in a trace of one step: why the profiler does not work, "" if it does, the number of events,
    and the number of steps whose batches the input pipeline had prepared."""

    problem: str
    events: Count
    ready_steps: Count


class StepProfiler:
    """Takes the profiles that all ranks agreed on. All ranks call it at the same steps.

    `clocks_stopped` excludes work between two steps from the throughput. A run without a folder takes no profile.
    """

    def __init__(
        self,
        state: RankState,
        folder: RunFolder | None,
        cpu_group: dist.ProcessGroup,
        clocks_stopped: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._state, self._folder, self._cpu_group = state, folder, cpu_group
        self._clocks_stopped = clocks_stopped
        self._progress: Generator[None, _Resumed, None] | None = None
        self._agreed_steps = 0
        self.served_steps = 0
        """Sum of the steps of all requests that have been answered, see `RequestCounters.profile_steps`."""

    def advance(self, agreed_steps: int) -> None:
        """Begin or continue a profile between two training steps. Call while `served_steps` differs from these."""
        self._agreed_steps = agreed_steps
        if self._progress is None:
            self._progress = self._take(min(agreed_steps - self.served_steps, MAX_PROFILE_STEPS))
        self._resume(self._progress, None)

    def interrupt(self, interruption: Interruption) -> None:
        """End or delay the profile in progress, if there is one, because of what follows the latest step."""
        if self._progress is not None:
            self._resume(self._progress, interruption)

    def _resume(self, progress: Generator[None, _Resumed, None], interruption: _Resumed) -> None:
        try:
            progress.send(interruption)
        except StopIteration:
            self._progress = None
            # Requests that came in the meantime are answered by this profile.
            self.served_steps = self._agreed_steps

    def _take(self, requested: int) -> Generator[None, _Resumed, None]:
        """Take one profile and report it. Each `yield` trains a step, or waits for what interrupts the training."""
        steps, folder = 0, ""
        try:
            # 1. Time some steps without the profiler.
            unprofiled = yield from self._time_unprofiled()
            # 2. Profile one step. This starts torch's profiler, and shows how many events a step has.
            max_steps, settle_steps = yield from self._calibrate()
            # 3. Train until the batches are used up that the input pipeline has prepared meanwhile.
            warmup_steps = min(1, self._state.sampler.steps_per_epoch - 1)
            count = warmup_steps + min(requested, max_steps)
            yield from self._settle(settle_steps, count)
            # 4. Record one step to warm up, then the profile.
            recording, interruption = yield from self._record(count, warmup_steps)
            # 5. Compute where the time went, and write it.
            recording.unprofiled = unprofiled
            steps = recording.marks.count - warmup_steps
            message = _why_fewer(steps, requested, max_steps, interruption)
            if steps < 1:
                raise ProfileError(message, code="too-small")
            with self._clocks_stopped():
                folder = write_profile(self._state, self._folder, self._cpu_group, recording, requested, message)
                del recording
                release_free_memory()
        except ProfileError as error:
            steps, message = 0, str(error)
        position = self._state.position
        event = Profiled(
            step=position.step - max(steps - 1, 0), epoch=position.epoch, steps=steps, folder=folder, message=message
        )
        if dist.get_rank() == 0:
            self._state.channel.send(event)

    def _time_unprofiled(self) -> Generator[None, _Resumed, float | None]:
        """Return the mean seconds of a few steps; None if epochs, or the steps between checkpoints, are too few."""
        position, count = self._state.position, min(UNPROFILED_STEPS, self._state.sampler.steps_per_epoch - 1)
        for _ in range(MAX_UNPROFILED_ATTEMPTS if count > 0 else 0):
            first, start = position.step, self._now()
            while position.step < first + count:
                if (yield from _next_step()) is not None:
                    break
            else:
                return (self._now() - start) / count
        return None

    def _now(self) -> float:
        """Return the time at which the device has finished all steps so far."""
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)
        return time.perf_counter()

    def _calibrate(self) -> Generator[None, _Resumed, tuple[int, int]]:
        """Return the number of steps that fit into a trace, and the number of steps after which the input is as slow
        as before. Raises ProfileError, on all ranks, if torch's profiler does not work."""
        with self._clocks_stopped():
            recording = self._start()
        interruption = yield
        with self._clocks_stopped():
            recording.stop()
            ready_steps = ceil(self._state.batches.ready_batches / self._state.sampler.accumulate)
            mine = Calibration(problem=recording.problem, events=len(recording.events()), ready_steps=ready_steps)
            ranks = all_gather_records(mine, self._cpu_group)
        for rank, calibration in enumerate(ranks):
            if calibration.problem:
                reason = f"torch.profiler does not work on rank {rank}: {calibration.problem}"
                raise ProfileError(reason, code="library-failed")
        if interruption is not None:
            yield from _next_step(interruption)
        most_events, most_ready = max(rank.events for rank in ranks), max(rank.ready_steps for rank in ranks)
        return max(MAX_EVENTS // max(most_events, 1), 1), min(most_ready, MAX_SETTLE_STEPS)

    def _settle(self, settle_steps: int, count: int) -> Generator[None, _Resumed, None]:
        """Train until `count` steps can be recorded: after `settle_steps` in a row, and within one epoch."""
        position, per_epoch, settled = self._state.position, self._state.sampler.steps_per_epoch, 0
        while True:
            left = per_epoch - position.step_in_epoch
            is_last_epoch = position.epoch == self._state.config.run.epochs
            if left >= count:
                can_begin = settled >= settle_steps or left == count
            else:
                # Short epochs, and the end of the run, have fewer steps.
                can_begin = left == per_epoch or (is_last_epoch and left > 1)
            if can_begin:
                return
            settled = settled + 1 if (yield from _next_step()) is None else 0

    def _record(self, count: int, warmup_steps: int) -> Generator[None, _Resumed, tuple[Recording, _Resumed]]:
        """Record `count` steps; return why there are fewer, if there are."""
        with self._clocks_stopped():
            recording = self._start()
        recording.warmup_steps = warmup_steps
        state, times_input = self._state, False
        interruption: _Resumed = None
        state.timer.marks = recording.marks
        while recording.marks.count < count:
            if recording.marks.count == warmup_steps and not times_input:
                times_input = True
                state.batches.start_stage_times()
            interruption = yield
            if interruption is Interruption.CHECKPOINT:
                recording.marks.interrupt()
            elif interruption is not None:
                break
        state.timer.marks = None
        with self._clocks_stopped():
            recording.stop()
            recording.input = state.batches.stop_stage_times() if times_input else None
        return recording, interruption

    def _start(self) -> Recording:
        """Start torch's profiler; a problem is reported later, because all ranks must take part in what follows."""
        self._state.enter_phase(Phase.PROFILE)
        # Otherwise the profiler writes lines for its own developers to stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # As torch.profiler does for CUDA graphs, which crash if CUPTI is removed and comes back.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        # Instead of torch.profiler.profile, which imports torch._inductor: that takes seconds and 100 MB.
        use_device = "cuda" if self._state.device.type == "cuda" else None
        recording = Recording(profile(use_kineto=True, use_device=use_device), StepMarks(self._state.device))
        recording.start()
        return recording


def _next_step(interruption: _Resumed = None) -> Generator[None, _Resumed, _Resumed]:
    """Train until the beginning of the next step; return what came before it. Raises ProfileError if none comes."""
    if interruption is None:
        interruption = yield
    latest = interruption
    while latest is not None:
        if latest is Interruption.STOP:
            raise ProfileError(latest.value, code="interrupted")
        latest = yield
    return interruption


def _why_fewer(steps: int, requested: int, max_steps: int, interruption: _Resumed) -> str:
    """Return why fewer steps were recorded than requested; "" if all were."""
    if steps >= requested:
        return ""
    if steps == max_steps:
        return f"a trace holds at most {MAX_EVENTS:,} events"
    return interruption.value if interruption is not None else "the epoch has no more steps"
