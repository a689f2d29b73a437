"""The result of one check of `gputrain doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

CheckArea = Literal["machine", "GPUs", "torch"]
CheckState = Literal["ok", "warning", "problem", "unknown"]


@dataclass(frozen=True)
class Check:
    """What was `found`, and `advice` if it needs attention.

    A problem keeps runs from training, or from training correctly; a warning may slow them down. `gpu` is the index of
    the GPU that the check is about. `code` is the kind of problem, as in `engine.base.errors.Problem`; an "ok" check
    has none."""

    area: CheckArea
    name: str
    state: CheckState
    found: str
    advice: str = ""
    gpu: int | None = None
    code: str = field(default="", kw_only=True)

    def to_dict(self) -> dict[str, str]:
        """Return the check as a dict for JSON. The name of a GPU's check contains its index, so `gpu` is omitted."""
        return {key: value for key, value in asdict(self).items() if key != "gpu"}
