"""What a sampler is asked for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

LEAST_PERIOD_SECONDS = 0.25
LEAST_PATIENCE_SECONDS = 2.0


@dataclass
class Wants:
    """What is to be asked, and how often in seconds. `gpus` are UUIDs; None means all."""

    period: float = 1.0
    activity: bool = True
    links: bool = False
    processes: bool = True
    gpus: list[str] | None = None

    @property
    def patience(self) -> float:
        """Seconds after which a GPU that has not answered is stale."""
        return max(LEAST_PATIENCE_SECONDS, 2.5 * self.period)

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Wants:
        known = {part.name for part in fields(cls)}
        return cls(**{key: value for key, value in json.loads(line).items() if key in known})
