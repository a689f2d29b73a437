"""Reservations as other processes see them, without files."""

from __future__ import annotations

from typing import Any

from engine.gpus.reservation_entry import ReservationInfo


def make_reservation(run: str, uid: int, **changes: Any) -> ReservationInfo:
    """A run that waits for GPUs; `changes` are by field."""
    values: dict[str, Any] = {"since": 1.0, "selection": "all", "visible": (), "gpus": (), "ranks": ()}
    values |= {
        "user_folder": f"gputrain-{uid}",
        "lock_name": f"{run}.lock",
        "renewed_at": 1e11,
        "priority": 0,
        "blocked": "",
        "share": 1,
    } | changes
    return ReservationInfo(run=run, uid=uid, **({"position": values["since"]} | values))
