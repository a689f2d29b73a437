"""Runs as rows: name, state, epoch, best accuracy, age."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from engine.runs import RunFolder


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
    touched = max((path.stat().st_mtime for path in (folder.journal, folder.lock) if path.exists()), default=time.time())
    return RunRow(
        folder.name,
        str(folder.state(history)),
        history.epochs[-1].epoch if history.epochs else 0,
        history.started.epochs if history.started else None,
        history.best.val_accuracy if history.best else None,
        round(max(time.time() - touched, 0.0), 1),
        str(folder.path),
    )


def as_table(rows: list[RunRow]) -> str:
    header = ("NAME", "STATE", "EPOCH", "BEST ACCURACY", "AGE")
    cells = [
        (
            row.name,
            row.state,
            f"{row.epoch}/{row.epochs or '?'}",
            "–" if row.best_val_accuracy is None else f"{row.best_val_accuracy:.4f}",
            age_in_words(row.age_seconds),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in [header, *cells]
    )


def age_in_words(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
