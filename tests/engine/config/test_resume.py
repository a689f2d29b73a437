"""What a resumed run may change in its config, and what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.loader import resolve_config
from engine.config.resume import describe_changes, find_changes, immutable_key_problems
from engine.config.schema import as_dict
from support.messages import has_problem


def saved(*overrides: str) -> dict[str, dict[str, Any]]:
    return as_dict(resolve_config("digits", overrides).config)


@pytest.mark.parametrize(
    "change", ["run.seed=5", "run.monitor=loss", "data.val_split=0.4", "data.mean=[0.1]", "optim.name=adam"]
)
def test_immutable_key_problems_names_key_and_both_values(change: str) -> None:
    changes = find_changes(saved(), resolve_config("digits", [change]).config)
    key = change.partition("=")[0]
    [problem] = [problem for problem in immutable_key_problems(changes) if problem.location == key]
    before, after = next((before, after) for changed, before, after in changes if changed == key)
    shown = "null" if before is None else before
    assert has_problem([problem], "resume-differs", key, f" {shown}, ", f" {after};")


def test_describe_changes_reports_one_sentence_per_key() -> None:
    config = resolve_config("digits", ["optim.lr=0.05", "run.epochs=30", "augment.flip=true"]).config
    changes = find_changes(saved("optim.lr=0.1", "run.epochs=15"), config)
    assert immutable_key_problems(changes) == []
    expected = (
        ("run.epochs ", " 15 ", " 30 "),
        ("augment.flip ", " false ", " true "),
        ("optim.lr ", " 0.1 ", " 0.05 "),
    )
    for warning, values in zip(describe_changes(changes), expected, strict=True):
        assert has_problem([warning], "resume-differs", "", *values)


def test_find_changes_gives_missing_key_its_default() -> None:
    earlier = saved()
    del earlier["model"]["init_std"], earlier["checkpoint"]
    assert find_changes(earlier, resolve_config("digits").config) == []
    changed = resolve_config("digits", ["model.init_std=0.1"]).config
    assert find_changes(earlier, changed) == [("model.init_std", 0.02, 0.1)]


@pytest.mark.parametrize("spelling", ["./code", "link", "code/"])
def test_find_changes_treats_spellings_of_a_path_as_equal(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "link").symlink_to("code")
    config = resolve_config("digits", [f"run.code={tmp_path}/code"]).config
    assert find_changes(saved(f"run.code={tmp_path}/{spelling}"), config) == []
    assert find_changes(saved(f"run.code={tmp_path}/elsewhere"), config) != []
