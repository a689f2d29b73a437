"""Config section `queue`: when a run that waits for GPUs gets them, and whether it shares them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, Strict

from engine.config.section import Section, as_text_list

MAX_PRIORITY = 1000
ANY_END = ":any"


RunReferences = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...], BeforeValidator(as_text_list), Strict(False)
]


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
        "means one GPU.",
    )
    time_limit: float = Field(
        0.0,
        ge=0,
        le=1e6,
        title="time limit",
        description="Stop with a checkpoint after this many minutes of training; 0 disables. Lets the run use GPUs "
        "that a run with queue.backfill waits for.",
    )
    backfill: float = Field(
        0.0,
        ge=0,
        le=1e6,
        title="backfill",
        description="Minutes for which later runs may use free GPUs while this run waits for more: those whose "
        "queue.time_limit ends within these minutes, counted from when the first GPU became free. They delay this run "
        "by no more than that. 0: no run passes this one.",
    )
