"""Gather the times of profiled steps and the traces from all ranks, and write the profile on rank 0.

`engine.training.profile` records the steps, `engine.runs.profile_file` defines the files.
"""

from __future__ import annotations

import gzip
import shutil
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from engine.distributed.collectives import gather_bytes
from engine.distributed.watchdog import Phase
from engine.runs.folder import RunFolder
from engine.runs.profile_file import (
    MAX_OPERATORS,
    MAX_TRACE_BYTES,
    PARTS,
    RECORD_NAME,
    Operator,
    PartTime,
    Profile,
    RankProfile,
    folder_name,
    new_profile_folder,
    trace_name,
    write_trace,
)
from engine.runs.sinks import describe_error
from engine.training.rank_state import RankState
from engine.training.step_marks import MARK_PREFIX, StepMarks
from engine.utils.answers import Answer
from engine.utils.codec import InvalidRecordError, decode, encode, replace, write_record
from engine.utils.errors import CodedError, Problem

# Other ranks have no trace, so that the profile of hundreds of ranks stays small.
MAX_TRACES = 16


class ProfileError(CodedError):
    """No profile could be taken. The message says why in a clause."""


@dataclass
class Recording:
    """What one rank records: the events of torch's profiler, and the marks of the steps.

    `problem` says why the profiler does not work, "" if it does. The first `warmup_steps` are not part of the profile.
    """

    profiler: profile
    marks: StepMarks
    problem: str = ""
    warmup_steps: int = 0

    def start(self) -> None:
        try:
            self.profiler.__enter__()
        except Exception as error:
            self.problem = describe_error(error)

    def stop(self) -> None:
        if not self.problem:
            try:
                self.profiler.__exit__(None, None, None)
            except Exception as error:
                self.problem = describe_error(error)


def write_profile(
    state: RankState,
    folder: RunFolder | None,
    cpu_group: dist.ProcessGroup,
    recording: Recording,
    requested: int,
    note: str,
) -> str:
    """Write the profile of all ranks on rank 0; return its folder, relative to the run. A collective.

    Raises ProfileError on rank 0 if it cannot be written.
    """
    state.enter_phase(Phase.PROFILE)
    mine, trace = _profile_of_rank(recording, state)
    gathered = gather_bytes(encode(mine), cpu_group)
    traces = _gather_traces(trace, state, cpu_group)
    if dist.get_rank() != 0:
        return ""
    ranks, problems = list[RankProfile](), list[str]()
    for rank, data in enumerate(gathered):
        try:
            answer = decode(data, Answer[RankProfile])
        except InvalidRecordError as error:
            answer = _refuse(f"it {error}")
        ranks += [] if answer.value is None else [answer.value]
        problems += [f"rank {rank} has no profile: {problem.reason}" for problem in answer.problems]
    if not ranks or folder is None:
        raise ProfileError("; ".join(problems[:1]) or "the run has no folder", code="library-failed")
    position, steps = state.position, len(ranks[0].steps)
    result = Profile(
        time=time.time(),
        step=position.step - steps + 1,
        epoch=position.epoch,
        steps=steps,
        requested=requested,
        note="; ".join(filter(None, [note, *problems])),
        device_type="cuda" if state.device.type == "cuda" else "cpu",
        batch_size=state.sampler.batch_size,
        ranks=ranks,
    )
    try:
        with new_profile_folder(folder, result.step) as path:
            for rank, data in traces.items():
                write_trace(path, rank, data)
            write_record(path / RECORD_NAME, result)
    except OSError as error:
        raise ProfileError(f"the profile cannot be written: {describe_error(error)}", code="not-writable") from error
    return f"{folder.profiles.name}/{folder_name(result.step)}"


def _gather_traces(trace: bytes, state: RankState, cpu_group: dist.ProcessGroup) -> dict[int, bytes]:
    """Return the traces of the first ranks on rank 0, nothing on other ranks. A collective of these ranks.

    One rank after the other: a gather would pad all of them to the longest.
    """
    rank, traces = dist.get_rank(), {0: trace}
    for sender in range(1, min(dist.get_world_size(), MAX_TRACES)):
        state.enter_phase(Phase.PROFILE)
        size = torch.tensor([len(trace)])
        if rank == sender:
            dist.send(size, 0, group=cpu_group)
            if trace:
                dist.send(torch.frombuffer(bytearray(trace), dtype=torch.uint8), 0, group=cpu_group)
        elif rank == 0:
            dist.recv(size, sender, group=cpu_group)
            received = torch.empty(int(size), dtype=torch.uint8)
            if len(received):
                dist.recv(received, sender, group=cpu_group)
            traces[sender] = received.numpy().tobytes()
    return {sender: data for sender, data in traces.items() if data} if rank == 0 else {}


def _profile_of_rank(recording: Recording, state: RankState) -> tuple[Answer[RankProfile], bytes]:
    """Return the profile of this rank, or why there is none, and its trace."""
    rank = dist.get_rank()
    try:
        if recording.problem:
            raise ProfileError(recording.problem, code="library-failed")
        profiled = _analyze(recording, state)
        trace, problem = b"", f"only the first {MAX_TRACES} ranks have a trace"
        if rank < MAX_TRACES:
            trace, problem = _export_trace(recording.profiler)
        name = "" if problem else trace_name(rank)
        return Answer(value=replace(profiled, trace=name, problem=problem)), trace
    # A profile must not end the run, and the other ranks wait for this one.
    except Exception as error:
        return _refuse(str(error) if isinstance(error, ProfileError) else describe_error(error)), b""


def _refuse(reason: str) -> Answer[RankProfile]:
    return Answer(problems=(Problem("", reason, code="library-failed"),))


def _analyze(recording: Recording, state: RankState) -> RankProfile:
    """Return where the time of this rank went."""
    device, steps = state.device, recording.marks.parts()[recording.warmup_steps :]
    durations = [sum(step.values()) for step in steps]
    parts = {part: [step[part] for step in steps] for part in PARTS}
    return RankProfile(
        rank=dist.get_rank(),
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        steps=durations,
        parts={
            part: PartTime(mean=statistics.fmean(each), median=statistics.median(each)) for part, each in parts.items()
        },
        operators=_operators(recording, durations, on_device=device.type == "cuda"),
    )


def _operators(recording: Recording, durations: list[float], *, on_device: bool) -> list[Operator]:
    """Return the operators that took the most time of their own, over all steps of the profile."""
    share = len(durations) / recording.marks.count
    averages = recording.profiler.key_averages()
    times = [
        (each, (each.self_device_time_total if on_device else each.self_cpu_time_total) / 1e6) for each in averages
    ]
    times = [(each, seconds) for each, seconds in times if not each.key.startswith(MARK_PREFIX)]
    return [
        Operator(
            name=each.key[:1000],
            calls=round(each.count * share),
            seconds=seconds * share,
            share=seconds * share / max(sum(durations), 1e-9),
        )
        for each, seconds in sorted(times, key=lambda row: -row[1])[:MAX_OPERATORS]
    ]


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
