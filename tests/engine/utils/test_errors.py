"""Suggestions for misspelled words."""

from __future__ import annotations

from engine.utils.errors import did_you_mean


def test_did_you_mean_suggests_closest_word() -> None:
    assert did_you_mean("resnet81", ["resnet18", "cnn"]) == "; did you mean resnet18?"


def test_did_you_mean_suggests_no_word_for_path() -> None:
    assert did_you_mean("/nope/resnet18", ["resnet18"]) == ""
