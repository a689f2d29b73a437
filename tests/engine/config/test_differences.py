"""Differences between stored configs: defaults filled in, equal paths, keys that change no result, hostile values."""

from __future__ import annotations

from engine.config.differences import (
    TOO_LARGE,
    differing_keys,
    flat_values,
    seed_group_key,
)


def differences(*stored: dict[str, object]) -> dict[str, tuple[object, ...]]:
    return {part.key: part.values for part in differing_keys([flat_values(values) for values in stored])}


def test_differing_keys_fill_in_the_defaults_of_keys_that_an_earlier_version_did_not_store() -> None:
    early = {"optim": {"lr": 0.1}, "of_the_past": {"key": 1}}
    late = {"optim": {"lr": 0.1, "momentum": 0.5, "future": 3}, "run": {"seed": 0}}
    assert differences(early, late) == {"optim.momentum": (0.9, 0.5)}


def test_seed_group_key_ignores_the_seed_and_keys_that_change_no_result() -> None:
    same = seed_group_key(flat_values({"run": {"seed": 1, "name": "a"}, "checkpoint": {"keep": 1}}))
    assert same == seed_group_key(flat_values({"run": {"seed": 2, "log_every": 5}, "device": {"gpus": "0"}}))
    assert same != seed_group_key(flat_values({"optim": {"lr": 0.2}}))


def test_flat_values_bound_the_size_of_values() -> None:
    options: object = "x"
    for _ in range(12):
        # Each list contains the one before eight times, as YAML's aliases do.
        options = [options] * 8
    assert flat_values({"optim": {"options": options}})["optim.options"] == TOO_LARGE
