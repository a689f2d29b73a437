"""Config section `queue`: when a run that waits for GPUs gets them, and whether it shares them."""

from __future__ import annotations

import re
import time
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from engine.base.units import parse_size
from engine.config.begin_time import NOT_A_BEGIN_TIME, begin_time
from engine.config.section import Section, Text, as_text_list

MAX_PRIORITY = 1000
ANY_END = ":any"
MINUTES = {"s": 1 / 60, "min": 1, "h": 60, "d": 1440}
_DURATION = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(MINUTES)})")


RunReferences = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...], BeforeValidator(as_text_list), Strict(False)
]


def _check_memory_size(text: str) -> str:
    """Raise PydanticCustomError unless the text is a size with a unit."""
    if parse_size(text) is None:
        raise PydanticCustomError("memory_size", "must be a size with a unit, such as 20G or 512M")
    return text


def _check_begin(text: str) -> str:
    """Raise PydanticCustomError unless the text is a time."""
    if begin_time(text, time.time()) is None:
        raise PydanticCustomError("begin_time", NOT_A_BEGIN_TIME)
    return text


def _as_minutes(value: object) -> object:
    """Return the minutes of a time with a unit, such as 90min, 8h or 1d; anything else as it is."""
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return value if match is None else float(match[1]) * MINUTES[match[2]]


Minutes = Annotated[float, BeforeValidator(_as_minutes)]
MemorySize = Annotated[Text, AfterValidator(_check_memory_size)]
BeginText = Annotated[Text, AfterValidator(_check_begin)]


class QueueConfig(Section):
    """Section `queue`: order, dependencies and sharing of runs that wait for GPUs."""

    priority: int = Field(
        0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Order among your own waiting runs: the highest starts first. Between users, the order of arrival "
        "counts.",
    )
    after: RunReferences = Field(
        (),
        title="after runs",
        description="Wait until these runs have finished. If one is stopped, this run is held until that one is "
        "resumed and finishes. RUN:any accepts a run however it ends. Implies device.wait. Set it on the command line.",
    )
    share: int = Field(
        1,
        ge=1,
        le=64,
        title="runs per GPU",
        description="Let up to this many runs use one GPU, if all of them allow it. With more than 1, device.gpus=auto "
        "means one GPU. With queue.min_free, 1 is any number.",
    )
    min_free: MemorySize | None = Field(
        None,
        title="memory per GPU",
        description="Reserve this much memory of each GPU, such as 20G. The run does not reserve whole GPUs: it "
        "starts on GPUs that have this much free, and runs whose reservations fit share a GPU. Processes "
        "of others count with what they use. It is not enforced. With it, device.gpus=auto means one "
        "GPU.",
    )
    begin: BeginText | None = Field(
        None,
        title="begin",
        description="Wait until this time, such as now+2h or 22:00. It may also be tomorrow or 2026-12-01T08:00, as "
        "for sbatch --begin. The time is local; a time of day that has passed is that of tomorrow. "
        "Implies device.wait. Set it on the command line.",
    )
    time_limit: Minutes = Field(
        0.0,
        ge=0,
        le=1e6,
        title="time limit",
        description="Stop the run this many minutes after its start, or 90s, 8h, 2d; 0 disables. A training saves a "
        "checkpoint. With --on slurm it is that of the job, which continues the run.",
    )

    @property
    def min_free_bytes(self) -> int:
        """The memory that the run reserves of each GPU, 0 for whole GPUs."""
        return parse_size(self.min_free or "") or 0
