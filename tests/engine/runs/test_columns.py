"""The columns that a list of runs can have."""

from __future__ import annotations

from engine.runs.run_view import known_columns


def test_known_columns_omit_names_of_other_versions() -> None:
    known = known_columns(["lr", "no.such.key", "optim.lr", "state"])
    assert [field.name for field in known] == ["optim.lr", "state"]
