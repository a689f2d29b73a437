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
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from engine.distributed.collectives import gather_bytes
from engine.distributed.watchdog import Phase
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
from engine.training.rank_state import RankState
from engine.utils.answers import Answer
from engine.utils.codec import InvalidRecordError, decode, encode
from engine.utils.errors import CodedError, Problem

# Other ranks have no trace, so that the profile of hundreds of ranks stays small.
MAX_TRACES = 16
# The profiler, the seconds of each part of each step, and how many of the first steps are not part of the profile.
Recorded = tuple[profile, list[dict[Part, float]], int]


class ProfileError(CodedError):
    """No profile could be taken. The message says why in a clause."""


def write_profile(state: RankState, recorded: Recorded | str, requested: int, note: str) -> str:
    """Write the profile of all ranks on rank 0; return its folder, relative to the run. A collective.

    `recorded` says why there is no profile of this rank if it is a text. Raises ProfileError on rank 0 if the profile
    cannot be written.
    """
    state.enter_phase(Phase.PROFILE)
    mine, trace = _profile_of_rank(recorded, state)
    answers = [_read_answer(data) for data in gather_bytes(encode(mine), state.cpu_group)]
    traces = _gather_traces(trace, state)
    if dist.get_rank() != 0:
        return ""
    folder = state.job.folder
    ranks = [answer.value for answer in answers if answer.value is not None]
    problems = [
        f"rank {rank} has no profile: {problem.reason}"
        for rank, answer in enumerate(answers)
        for problem in answer.problems
    ]
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
        with folder.opened() as opened:
            name = store_profile(opened, result, traces)
    except OSError as error:
        raise ProfileError(f"the profile cannot be written: {describe_error(error)}", code="not-writable") from error
    return f"{folder.profiles.name}/{name}"


def _read_answer(data: bytes) -> Answer[RankProfile]:
    try:
        return decode(data, Answer[RankProfile])
    except InvalidRecordError as error:
        return Answer(problems=(Problem("", f"it {error}", code="library-failed"),))


def _gather_traces(trace: bytes, state: RankState) -> dict[int, bytes]:
    """Return the traces of the first ranks on rank 0, nothing on other ranks. A collective of these ranks.

    One rank after the other: a gather would pad those of all ranks to the longest.
    """
    rank, traces = dist.get_rank(), {0: trace}
    for sender in range(1, min(dist.get_world_size(), MAX_TRACES)):
        state.enter_phase(Phase.PROFILE)
        size = torch.tensor([len(trace)])
        if rank == sender:
            dist.send(size, 0, group=state.cpu_group)
            if trace:
                dist.send(torch.frombuffer(bytearray(trace), dtype=torch.uint8), 0, group=state.cpu_group)
        elif rank == 0:
            dist.recv(size, sender, group=state.cpu_group)
            received = torch.empty(int(size), dtype=torch.uint8)
            if len(received):
                dist.recv(received, sender, group=state.cpu_group)
            traces[sender] = received.numpy().tobytes()
    return {sender: data for sender, data in traces.items() if data}


def _profile_of_rank(recorded: Recorded | str, state: RankState) -> tuple[Answer[RankProfile], bytes]:
    """Return the profile of this rank, or why there is none, and its trace."""
    rank, reason = dist.get_rank(), recorded
    if not isinstance(recorded, str):
        try:
            trace, problem = b"", f"only the first {MAX_TRACES} ranks have a trace"
            if rank < MAX_TRACES:
                trace, problem = _export_trace(recorded[0])
            return Answer(value=_analyze(recorded, state, "" if problem else trace_name(rank), problem)), trace
        # A profile must not end the run, and the other ranks wait for this one.
        except Exception as error:
            reason = describe_error(error)
    return Answer(problems=(Problem("", str(reason), code="library-failed"),)), b""


def _analyze(recorded: Recorded, state: RankState, trace: str, problem: str) -> RankProfile:
    """Return where the time of this rank went."""
    _, all_steps, warmup_steps = recorded
    steps, on_device = all_steps[warmup_steps:], state.device.type == "cuda"
    times = {part: [step[part] for step in steps] for part in PARTS}
    return RankProfile(
        rank=dist.get_rank(),
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(state.device) if on_device else "cpu",
        steps=[sum(step.values()) for step in steps],
        parts={
            part: PartTime(mean=statistics.fmean(each), median=statistics.median(each)) for part, each in times.items()
        },
        trace=trace,
        problem=problem,
    )


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
