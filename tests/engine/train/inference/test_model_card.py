"""Model card of an export: what it says, and text from outside in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.train.inference.model_card import code
from support.runs.trained_run import call, saved_run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat", "`cat`"),
        ("a`b``c", "```a`b``c```"),
        ("`", "`` ` ``"),
        ("\x1b[31m\n# title", "`\\x1b[31m\\n# title`"),
        ("<img src=x>", "`<img src=x>`"),
        ("  ", "`    `"),
    ],
)
def test_code_span_shows_text_as_it_is(text: str, expected: str) -> None:
    assert code(text) == expected


def test_model_card_names_run_packages_and_agreement(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "flowers")
    assert call("export", run.path, "--check-images", "4").exit_code == 0
    card = (run.export / "README.md").read_text()
    assert all(part in card for part in ("# `flowers`", "pip install torch", "on 4 validation images"))
