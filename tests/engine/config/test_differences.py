"""Differences between stored configs: defaults filled in, equal paths, keys that change no result, hostile values."""

from __future__ import annotations

from pathlib import Path

from engine.config.differences import (
    NEUTRAL_KEYS,
    differing_keys,
    flat_values,
    is_neutral,
    seed_group_key,
)
from engine.config.schema import fields


def differences(*stored: dict[str, object]) -> dict[str, tuple[object, ...]]:
    return {part.key: part.values for part in differing_keys([flat_values(values) for values in stored])}


def test_differing_keys_fill_in_the_defaults_of_keys_that_an_earlier_version_did_not_store() -> None:
    early = {"optim": {"lr": 0.1}, "of_the_past": {"key": 1}}
    late = {"optim": {"lr": 0.1, "momentum": 0.5, "future": 3}, "run": {"seed": 0}}
    assert differences(early, late) == {"optim.momentum": (0.9, 0.5)}


def test_differing_keys_are_in_schema_order_with_the_values_of_all_configs() -> None:
    configs = [flat_values({"optim": {"lr": 0.2}}), None, flat_values({"run": {"epochs": 3}})]
    listed = differing_keys(configs)
    assert [(part.key, part.values) for part in listed] == [
        ("run.epochs", (10, None, 3)),
        ("optim.lr", (0.2, None, 0.05)),
    ]


def test_differing_keys_take_two_spellings_of_a_path_as_equal(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert differences({"data": {"path": str(tmp_path)}}, {"data": {"path": f"{tmp_path}/link/."}}) == {}


def test_seed_group_key_ignores_the_seed_and_keys_that_change_no_result() -> None:
    same = seed_group_key(flat_values({"run": {"seed": 1, "name": "a"}, "checkpoint": {"keep": 1}}))
    assert same == seed_group_key(flat_values({"run": {"seed": 2, "log_every": 5}, "device": {"gpus": "0"}}))
    assert same != seed_group_key(flat_values({"optim": {"lr": 0.2}}))


def test_neutral_keys_are_in_the_schema_and_leave_the_training_keys() -> None:
    keys = {key for key, _ in fields()}
    assert keys >= NEUTRAL_KEYS
    assert not any(is_neutral(key) for key in keys if key.startswith(("optim.", "schedule.", "model.", "augment.")))
