"""Split the duration of profiled steps into parts: data, copy, forward, backward, all-reduce, optimizer and the rest.

`engine.training.profile_report` converts the events of torch.profiler to `Activity` records, and calls `cpu_parts` or
`gpu_parts`. All times are nanoseconds of one clock. The parts of a step do not overlap, and their sum is the duration
of the step.

On the CPU the parts are phases of the host: the marks that the training loop sets. After the last gradient, the
backward pass only waits for the all-reduce. On a GPU the host runs ahead, so the parts are what the device does:
each kernel belongs to the phase that launched it. If a computation and an NCCL kernel run at the same time, the time
counts as computation: only the rest of the all-reduce is exposed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.runs.profile_file import PARTS, Part

# Begin of the names of the marks in the trace.
MARK_PREFIX = "gputrain: "
STEP_MARK = f"{MARK_PREFIX}step"
# Autograd calls one of these per node of the graph, DDP's all-reduce included.
AUTOGRAD_NODE_PREFIX = "autograd::engine::evaluate_function"
# Of several activities on the device, the first one of these gets the time.
_DEVICE_PRIORITY: tuple[Part, ...] = ("forward", "backward", "optimizer", "other", "allreduce", "copy")

StepParts = dict[Part, int]


@dataclass(frozen=True, slots=True)
class Activity:
    """One event of a trace.

    `kind` is host for an operator or mark, launch for a call of the CUDA runtime, device for a kernel or a copy on the
    GPU. `lane` is the thread, or the stream of a device activity. `link` is equal for a launch and its device activity,
    `operator_link` for an operator and the device activities that it launches; 0 if there is none.
    """

    name: str
    kind: Literal["host", "launch", "device"]
    lane: int
    start: int
    end: int
    link: int = 0
    operator_link: int = 0

    @property
    def is_mark(self) -> bool:
        """Whether `engine.training.step_marks` made it."""
        return self.kind == "host" and self.name.startswith(MARK_PREFIX)


@dataclass(frozen=True, slots=True)
class Interval:
    """A half-open interval of time, with the phase of the host in it."""

    phase: Part
    start: int
    end: int


@dataclass(frozen=True)
class HostStep:
    """One step on the host, and the marked phases of its thread; time without a phase belongs to the rest.

    A step ends where the next one starts, so that the steps have no gaps between them.
    """

    start: int
    end: int
    phases: tuple[Interval, ...]


def host_steps(activities: Iterable[Activity], uninterrupted: Sequence[bool]) -> list[HostStep]:
    """Return the marked steps. A step lasts to the next one if nothing `uninterrupted` followed it, else to its own
    end."""
    marks = sorted(
        (activity for activity in activities if activity.is_mark),
        key=lambda mark: (mark.start, -mark.end),
    )
    step_marks = [mark for mark in marks if mark.name.startswith(STEP_MARK)]
    starts = [mark.start for mark in step_marks]
    phases: list[list[Interval]] = [[] for _ in step_marks]
    for mark in marks:
        phase = mark.name.removeprefix(MARK_PREFIX)
        index = bisect_right(starts, mark.start) - 1
        if phase in PARTS and index >= 0:
            phases[index].append(Interval(phase, mark.start, mark.end))
    steps = []
    for index, mark in enumerate(step_marks):
        continues = index + 1 < len(step_marks) and uninterrupted[index]
        end = step_marks[index + 1].start if continues else mark.end
        steps.append(HostStep(mark.start, end, tuple(phases[index])))
    return steps


def cpu_parts(
    steps: Sequence[HostStep], activities: Iterable[Activity], thread: int, *, has_allreduce: bool
) -> list[StepParts]:
    """Return the parts of each step of a rank on the CPU, whose training runs in `thread`.

    After the last node of autograd in the last backward pass of a step, DDP waits for its all-reduce: that is the time
    in which this thread runs no operator.
    """
    own = sorted((item for item in activities if item.lane == thread and not item.is_mark), key=lambda item: item.start)
    starts = [item.start for item in own]
    result = []
    for step in steps:
        parts: StepParts = dict.fromkeys(PARTS, 0)
        for phase in step.phases:
            parts[phase.phase] += phase.end - phase.start
        backward = next((phase for phase in reversed(step.phases) if phase.phase == "backward"), None)
        if has_allreduce and backward is not None:
            inside = own[bisect_left(starts, backward.start) : bisect_left(starts, backward.end)]
            exposed = _idle_after_last_node(inside, backward.end)
            parts["allreduce"] += exposed
            parts["backward"] -= exposed
        result.append(_with_rest(parts, step.end - step.start))
    return result


def _idle_after_last_node(activities: Sequence[Activity], end: int) -> int:
    """Return the time until `end` without an activity of a thread, after its last node of autograd."""
    ends = [item.end for item in activities if item.name.startswith(AUTOGRAD_NODE_PREFIX)]
    if not ends:
        return 0
    busy_until, idle = max(ends), 0
    for activity in activities:
        if activity.end > busy_until:
            idle += max(activity.start - busy_until, 0)
            busy_until = activity.end
    return idle + max(end - busy_until, 0)


def gpu_parts(steps: Sequence[HostStep], activities: Sequence[Activity], thread: int) -> list[StepParts] | None:
    """Return the parts of each step of a rank on a GPU; None if the trace has no kernels of these steps.

    A step lasts from its first kernel to the first one of the next step, the last step to the end of its last kernel.
    While the device is idle and the host waits for a batch, the time is data, else the rest.
    """
    if not steps:
        return None
    device = _attribute(steps, activities, thread)
    bounds = _device_bounds(steps, device)
    if bounds is None:
        return None
    waits = [phase for step in steps for phase in step.phases if phase.phase == "data"]
    result: list[StepParts] = [dict.fromkeys(PARTS, 0) for _ in steps]
    sweep = [(interval.start, interval.end, _DEVICE_PRIORITY.index(interval.phase)) for _, interval in device]
    # Below all activities of the device.
    sweep += [(wait.start, wait.end, len(_DEVICE_PRIORITY)) for wait in waits]
    for start, end, priority in _flatten(sweep):
        part: Part = "data" if priority == len(_DEVICE_PRIORITY) else _DEVICE_PRIORITY[priority]
        first = max(bisect_right(bounds, start) - 1, 0)
        for index in range(first, len(steps)):
            overlap = min(end, bounds[index + 1]) - max(start, bounds[index])
            if overlap > 0:
                result[index][part] += overlap
            if bounds[index + 1] >= end:
                break
    return [_with_rest(parts, bounds[index + 1] - bounds[index]) for index, parts in enumerate(result)]


def _with_rest(parts: StepParts, duration: int) -> StepParts:
    """Add the time of the step that no part has to the rest."""
    measured = sum(parts.values())
    return {**parts, "other": parts["other"] + max(duration - measured, 0)}


def _attribute(
    steps: Sequence[HostStep], activities: Sequence[Activity], thread: int
) -> list[tuple[int | None, Interval]]:
    """Return the device activities of the steps with the phase that each belongs to, and the index of the step if the
    training thread or autograd launched it."""
    launches = {activity.link: activity for activity in activities if activity.kind == "launch" and activity.link}
    operators = {activity.link: activity for activity in activities if activity.kind == "host" and activity.link}
    training_threads = {thread} | {
        activity.lane for activity in activities if activity.name.startswith(AUTOGRAD_NODE_PREFIX)
    }
    step_starts = [step.start for step in steps]
    result = []
    for activity in activities:
        if activity.kind != "device":
            continue
        launch = launches.get(activity.link) or operators.get(activity.operator_link)
        launched = launch.start if launch is not None else activity.start
        index = bisect_right(step_starts, launched) - 1
        is_in_step = index >= 0 and launched < steps[index].end
        by_training = launch is None or launch.lane in training_threads
        phase = _host_phase(steps[index], launched) if is_in_step else "other"
        if "nccl" in activity.name.lower():
            phase = "allreduce"
        elif "memcpy htod" in activity.name.lower() or phase == "data" or not by_training:
            # Input pipelines convert and augment batches on the device, too.
            phase = "copy"
        result.append((index if is_in_step and by_training else None, Interval(phase, activity.start, activity.end)))
    return result


def _host_phase(step: HostStep, time: int) -> Part:
    """Return the phase in which the host was at a time."""
    return next((phase.phase for phase in step.phases if phase.start <= time < phase.end), "other")


def _device_bounds(steps: Sequence[HostStep], device: Iterable[tuple[int | None, Interval]]) -> list[int] | None:
    """Return the time at which each step begins on the device, and the end of the last one; None if unknown."""
    first: dict[int, int] = {}
    last_end = 0
    for index, interval in device:
        if index is None or interval.phase == "copy":
            continue
        first[index] = min(first.get(index, interval.start), interval.start)
        if index == len(steps) - 1:
            last_end = max(last_end, interval.end)
    if len(first) < len(steps):
        return None
    bounds = [first[index] for index in range(len(steps))]
    # A step that is launched on two streams could begin before the previous one.
    return sorted([*bounds, max(last_end, bounds[-1])])


def _flatten(intervals: Sequence[tuple[int, int, int]]) -> Iterable[tuple[int, int, int]]:
    """Yield disjoint intervals; where some overlap, the one with the smallest last element wins."""
    events = sorted([(start, 1, priority) for start, _, priority in intervals])
    ends = sorted([(end, priority) for _, end, priority in intervals])
    active: dict[int, int] = defaultdict(int)
    heap: list[int] = []
    previous, opened, closed = 0, 0, 0
    while closed < len(ends):
        time = min(events[opened][0], ends[closed][0]) if opened < len(events) else ends[closed][0]
        while heap and not active[heap[0]]:
            heapq.heappop(heap)
        if heap and time > previous:
            yield previous, time, heap[0]
        while opened < len(events) and events[opened][0] == time:
            priority = events[opened][2]
            if not active[priority]:
                heapq.heappush(heap, priority)
            active[priority] += 1
            opened += 1
        while closed < len(ends) and ends[closed][0] == time:
            active[ends[closed][1]] -= 1
            closed += 1
        previous = time


def operator_seconds(
    activities: Sequence[Activity], start: int, end: int, *, on_device: bool
) -> list[tuple[str, int, float]]:
    """Return name, calls and own seconds of each operator between `start` and `end`, the longest first.

    On the host an operator's own time excludes the operators that it calls. On the device it is the time of the kernels
    that it launches; kernels without an operator have their own name.
    """
    calls: dict[str, int] = defaultdict(int)
    nanoseconds: dict[str, int] = defaultdict(int)
    inside = [activity for activity in activities if start <= activity.start < end]
    if on_device:
        operators = {activity.link: activity for activity in activities if activity.kind == "host" and activity.link}
        for activity in inside:
            if activity.kind == "device":
                operator = operators.get(activity.operator_link)
                name = operator.name if operator is not None else activity.name
                calls[name] += 1
                nanoseconds[name] += activity.end - activity.start
    else:
        stacks: dict[int, list[Activity]] = defaultdict(list)
        hosts = (activity for activity in inside if activity.kind == "host" and not activity.is_mark)
        for activity in sorted(hosts, key=lambda activity: (activity.start, -activity.end)):
            stack = stacks[activity.lane]
            while stack and stack[-1].end <= activity.start:
                stack.pop()
            duration = activity.end - activity.start
            if stack:
                nanoseconds[stack[-1].name] -= duration
            stack.append(activity)
            calls[activity.name] += 1
            nanoseconds[activity.name] += duration
    rows = [(name, calls[name], max(total, 0) / 1e9) for name, total in nanoseconds.items()]
    return sorted(rows, key=lambda row: -row[2])
