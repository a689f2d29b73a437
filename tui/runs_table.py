"""Runs as rows: name, state, epoch, best accuracy, age."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from engine.runs import RunFolder

HEADER = ("NAME", "STATE", "EPOCH", "BEST ACCURACY", "AGE")


@dataclass(frozen=True)
class RunRow:
    """`age_seconds` is the time since the run's last sign of life."""

    name: str
    state: str
    epoch: int
    epochs: int | None
    best_val_accuracy: float | None
    age_seconds: float
    folder: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def describe_run(folder: RunFolder) -> RunRow:
    history = folder.history()
    signs = [path.stat().st_mtime for path in (folder.journal, folder.lock) if path.exists()]
    return RunRow(
        folder.name,
        str(folder.state(history)),
        history.epochs[-1].epoch if history.epochs else 0,
        history.started.epochs if history.started else None,
        history.best.val_accuracy if history.best else None,
        round(max(time.time() - max(signs, default=time.time()), 0.0), 1),
        str(folder.path),
    )


def cells_of(row: RunRow) -> tuple[str, ...]:
    accuracy = "–" if row.best_val_accuracy is None else f"{row.best_val_accuracy:.4f}"
    return (row.name, row.state, f"{row.epoch}/{row.epochs or '?'}", accuracy, age_in_words(row.age_seconds))


def as_table(rows: list[RunRow]) -> str:
    lines = [HEADER, *(cells_of(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def age_in_words(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
