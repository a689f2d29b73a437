"""The private parts of typer: completion works in typer's plain way without them."""

from __future__ import annotations

import pytest

from tui.cli import typer_internals


def test_without_the_private_parts_typer_keeps_its_own_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer_internals.shared, "_completion_scripts", {"bash": "typer's own"})
    scripts = typer_internals.shared._completion_scripts
    monkeypatch.setattr(typer_internals, "shared", None)
    monkeypatch.setattr(typer_internals, "classes", None)
    typer_internals.prepare_shells()
    assert scripts == {"bash": "typer's own"}
