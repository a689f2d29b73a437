"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from engine.utils.host import Shortage

CheckArea = Literal["machine", "GPUs", "torch", "run"]
CheckState = Literal["ok", "warning", "problem", "unknown"]


@dataclass(frozen=True)
class Check:
    """What was `found`, and where that is not well the `advice`: a problem keeps runs from training as they should, a
    warning may. `gpu` is the index of the GPU that it is about."""

    area: CheckArea
    name: str
    state: CheckState
    found: str
    advice: str = ""
    gpu: int | None = None

    def to_dict(self) -> dict[str, str]:
        """The check as JSON, in which the name tells the GPU."""
        return {key: value for key, value in asdict(self).items() if key != "gpu"}


def shortage_check(area: CheckArea, name: str, shortage: Shortage | None, ok_message: str) -> Check:
    """A warning where there is a shortage."""
    if shortage is None:
        return Check(area, name, "ok", ok_message)
    return Check(area, name, "warning", shortage.found, shortage.advice)
