"""Profile training steps on request, on all ranks at the same steps, and write the profile on rank 0.

`control` calls `StepProfiler` between two steps; `gputrain runs profile` and the run screen send the request.
`engine.runs.profile_file` defines the files.
"""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from engine.base.answers import Answer
from engine.base.codec import InvalidRecordError, decode, encode
from engine.base.errors import CodedError, Problem
from engine.runs.control import MAX_PROFILE_STEPS
from engine.runs.events import Profiled
from engine.runs.folder import RunFolder
from engine.runs.profile_file import (
    MAX_TRACE_BYTES,
    PARTS,
    Part,
    PartTime,
    Profile,
    RankProfile,
    store_profile,
    trace_name,
)
from engine.runs.sinks import describe_error
from engine.train.distributed.collectives import gather_bytes
from engine.train.distributed.watchdog import Phase
from engine.train.loop.data import TrainingData
from engine.train.loop.log import TrainingLog

# The first step with the profiler is slower. It is in the trace, but not in the figures.
WARMUP_STEPS = 1
# Of more ranks only rank 0 has a trace, so that the profile of hundreds of ranks stays small.
MAX_TRACES = 16


class ProfileError(CodedError):
    """No profile could be taken. The message says why in a clause."""


class StepProfiler:
    """Takes the profiles that all ranks agreed on. All ranks call it at the same steps.

    A run without a folder takes no profile.
    """

    def __init__(
        self, folder: RunFolder | None, data: TrainingData, log: TrainingLog, cpu_group: dist.ProcessGroup
    ) -> None:
        self._folder, self._data, self._log, self._cpu_group = folder, data, log, cpu_group
        self._on_gpu = log.device.type == "cuda"
        self._profiler: profile | None = None
        """What records the steps; None if no profile is being taken."""
        self._steps: list[dict[Part, float]] = []
        """The seconds of each part of a step, for each step. The first steps warm up, and are not reported."""
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
            with self._log.clock.stopped():
                self._start()
        elif len(self._steps) >= WARMUP_STEPS + self._wanted:
            self._finish("")
            # Requests that came in the meantime are answered by this profile.
            self.served_steps = agreed_steps

    def interrupt(self, reason: str, *, is_last: bool = False) -> None:
        """End the profile in progress, if there is one, because of what follows the latest step.

        One without a step begins again after a pause, and in the next epoch, but not after the last step."""
        if self._profiler is None:
            return
        if len(self._steps) <= WARMUP_STEPS and not is_last:
            self._stop()
            return
        self._finish("" if len(self._steps) >= WARMUP_STEPS + self._wanted else reason)
        self.served_steps = self._agreed_steps

    def _start(self) -> None:
        self._log.enter_phase(Phase.PROFILE)
        # Otherwise the profiler writes lines for its own developers to stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # As torch.profiler does for CUDA graphs, which crash if CUPTI is removed and comes back.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        # Instead of torch.profiler.profile, which imports torch._inductor: that takes seconds and 100 MB.
        use_device = "cuda" if self._on_gpu else None
        self._profiler, self._problem = profile(use_kineto=True, use_device=use_device), ""
        try:
            self._profiler.__enter__()
        except Exception as error:
            self._problem = describe_error(error)
        self._log.clock.profiled = self._steps = []

    def _stop(self) -> profile | None:
        """Stop and return the profiler, if there is one."""
        profiler, self._profiler, self._log.clock.profiled = self._profiler, None, None
        if profiler is not None and not self._problem:
            try:
                profiler.__exit__(None, None, None)
            except Exception as error:
                self._problem = describe_error(error)
        return profiler

    def _finish(self, note: str) -> None:
        """Stop the profiler, write the profile and report it. `note` says why it has fewer steps than requested."""
        position, steps, folder = self._data.position, self._steps[WARMUP_STEPS:], ""
        with self._log.clock.stopped():
            self._log.clock.part_seconds()
            profiler = self._stop()
            if steps:
                try:
                    folder = self._write(profiler, steps, note)
                except ProfileError as error:
                    steps, note = [], str(error)
        step = position.step - max(len(steps) - 1, 0)
        self._log.emit(Profiled(step=step, epoch=position.epoch, steps=len(steps), folder=folder, message=note))

    def _write(self, profiler: profile | None, steps: Sequence[Mapping[Part, float]], note: str) -> str:
        """Write the profile of all ranks on rank 0; return its folder, relative to the run. A collective.

        Raises ProfileError on rank 0 if the profile cannot be written.
        """
        self._log.enter_phase(Phase.PROFILE)
        mine, trace = self._profile_of_rank(profiler, steps)
        records = gather_bytes(encode(mine), self._cpu_group)
        traces = [trace] if dist.get_world_size() > MAX_TRACES else gather_bytes(trace, self._cpu_group)
        folder, position = self._folder, self._data.position
        if dist.get_rank() != 0:
            return ""
        try:
            answers = [decode(data, Answer[RankProfile]) for data in records]
            ranks = [answer.value for answer in answers if answer.value is not None]
            problems = [
                f"rank {rank} has no profile: {problem.reason}"
                for rank, answer in enumerate(answers)
                for problem in answer.problems
            ]
            if not ranks or folder is None:
                raise ProfileError("; ".join(problems[:1]) or "the run has no folder", code="library-failed")
            result = Profile(
                time=time.time(),
                step=position.step - len(steps) + 1,
                epoch=position.epoch,
                steps=len(steps),
                requested=self._wanted,
                note="; ".join(filter(None, [note, *problems])),
                device_type="cuda" if self._on_gpu else "cpu",
                batch_size=self._data.sampler.batch_size,
                ranks=ranks,
            )
            with folder.opened() as opened:
                name = store_profile(opened, result, {rank: data for rank, data in enumerate(traces) if data})
        except (OSError, InvalidRecordError) as error:
            reason = f"the profile cannot be written: {describe_error(error)}"
            raise ProfileError(reason, code="not-writable") from error
        return f"{folder.profiles.name}/{name}"

    def _profile_of_rank(
        self, profiler: profile | None, steps: Sequence[Mapping[Part, float]]
    ) -> tuple[Answer[RankProfile], bytes]:
        """Return the profile of this rank, or why there is none, and its trace."""
        rank, reason = dist.get_rank(), self._problem
        if profiler is not None and not reason:
            try:
                trace, problem = b"", f"only rank 0 of more than {MAX_TRACES} ranks has a trace"
                if rank == 0 or dist.get_world_size() <= MAX_TRACES:
                    trace, problem = _export_trace(profiler)
                times = {part: [step[part] for step in steps] for part in PARTS}
                record = RankProfile(
                    rank=rank,
                    host=socket.gethostname(),
                    device=torch.cuda.get_device_name(self._log.device) if self._on_gpu else "cpu",
                    steps=[sum(step.values()) for step in steps],
                    parts={
                        part: PartTime(mean=statistics.fmean(each), median=statistics.median(each))
                        for part, each in times.items()
                    },
                    trace="" if problem else trace_name(rank),
                    problem=problem,
                )
                return Answer(value=record), trace
            # A profile must not end the run, and the other ranks wait for this one.
            except Exception as error:
                reason = describe_error(error)
        return Answer(problems=(Problem("", reason, code="library-failed"),)), b""


def _export_trace(profiler: profile) -> tuple[bytes, str]:
    """Return the trace, compressed, and why there is none, "" if there is one."""
    try:
        with tempfile.TemporaryDirectory(prefix="gputrain-profile-") as folder:
            path, compressed = Path(folder) / "trace.json", BytesIO()
            profiler.export_chrome_trace(str(path))
            # Level 1 takes a third of the time of level 9, for a file that is a quarter larger.
            with path.open("rb") as file, gzip.GzipFile("", "wb", 1, compressed) as archive:
                shutil.copyfileobj(file, archive, 1 << 20)
    except (OSError, RuntimeError) as error:
        return b"", f"the trace cannot be exported: {describe_error(error)}"
    if compressed.tell() > MAX_TRACE_BYTES:
        return b"", f"the trace has {compressed.tell() >> 20} MiB; at most {MAX_TRACE_BYTES >> 20} are kept"
    return compressed.getvalue(), ""
