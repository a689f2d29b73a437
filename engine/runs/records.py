"""What an event says of each rank or each GPU. `engine.runs.events` holds these records; `engine.runs.journal` writes
them as JSON objects and reads them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# No step, size or loss comes near it.
LARGEST = 2**63

JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class RankDevice:
    """A rank's process, and a device that it has there, which it has seen to be the one."""

    rank: int
    host: str
    pid: int
    device: str

    @classmethod
    def from_objects(cls, objects: Iterable[JsonObject]) -> list[RankDevice]:
        """The records of a journal; an incomplete one is left out."""
        found = []
        for one in objects:
            match one:
                case {"rank": int(rank), "host": str(host), "pid": int(pid), "device": str(device)}:
                    found.append(cls(rank, host, pid, device))
        return found


@dataclass(frozen=True)
class RankPeakMemory:
    """The most bytes of a rank's GPU in an epoch: `allocated` by tensors, `reserved` by torch for them."""

    rank: int
    allocated: int
    reserved: int

    @classmethod
    def from_objects(cls, objects: Iterable[JsonObject]) -> list[RankPeakMemory]:
        """The records of a journal; an incomplete one is left out."""
        found = []
        for one in objects:
            match one:
                case {"rank": int(rank), "allocated": int(allocated), "reserved": int(reserved)}:
                    found.append(cls(rank, allocated, reserved))
        return found


@dataclass(frozen=True)
class RankEpochTiming:
    """Seconds of an epoch's training on one rank: all of it, of waiting for data, and of forward passes."""

    rank: int
    seconds: float
    waited: float
    forward: float

    @property
    def local_seconds(self) -> float:
        """The part in which no rank waits for another."""
        return self.waited + self.forward

    @classmethod
    def from_objects(cls, objects: Iterable[JsonObject]) -> list[RankEpochTiming]:
        """The records of a journal; none where one is incomplete, because ranks are compared with each other."""
        found = []
        for one in objects:
            rank = one.get("rank")
            times = [number(one.get(name)) for name in ("seconds", "waited", "forward")]
            known = [time for time in times if time is not None and time >= 0]
            if not isinstance(rank, int) or len(known) < len(times):
                return []
            found.append(cls(rank, *known))
        return found


@dataclass(frozen=True)
class GpuSample:
    """What a GPU of a run did at one moment; None where the driver did not tell. `busy`, `sm_active` and
    `tensor_active` are in percent, `memory_used` in bytes, `temperature` in degrees Celsius, `power` in watts,
    `sm_clock` and `max_sm_clock` in MHz; `throttle` has the words of `engine.gpus.nvml`."""

    uuid: str | None
    host: str = ""
    state: str | None = None
    busy: float | None = None
    sm_active: float | None = None
    tensor_active: float | None = None
    memory_used: float | None = None
    temperature: float | None = None
    power: float | None = None
    sm_clock: float | None = None
    max_sm_clock: float | None = None
    throttle: list[str] | None = None

    @property
    def throttle_reasons(self) -> list[str]:
        """What holds the clocks down; idleness does not."""
        return [word for word in self.throttle or [] if word != "idle"]

    @classmethod
    def from_objects(cls, objects: Iterable[JsonObject]) -> list[GpuSample]:
        """The records of a journal; what is missing or of another type is None."""
        return [cls._from_object(one) for one in objects]

    @classmethod
    def _from_object(cls, values: JsonObject) -> GpuSample:
        uuid, host, state, throttle = (values.get(name) for name in ("uuid", "host", "state", "throttle"))
        return cls(
            uuid=uuid if isinstance(uuid, str) else None,
            host=host if isinstance(host, str) else "",
            state=state if isinstance(state, str) else None,
            busy=number(values.get("busy")),
            sm_active=number(values.get("sm_active")),
            tensor_active=number(values.get("tensor_active")),
            memory_used=number(values.get("memory_used")),
            temperature=number(values.get("temperature")),
            power=number(values.get("power")),
            sm_clock=number(values.get("sm_clock")),
            max_sm_clock=number(values.get("max_sm_clock")),
            throttle=[str(word) for word in throttle] if isinstance(throttle, list) else None,
        )


def number(value: object) -> float | None:
    """The value where it is a number that can be computed with."""
    return value if isinstance(value, int | float) and -LARGEST < value < LARGEST else None
