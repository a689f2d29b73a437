"""The stored config of a run as changed values: the fast parser, PyYAML, and hostile files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.config.loader import resolve_config
from engine.config.schema import Config, as_stored
from engine.config.yaml_io import parse_yaml, to_yaml
from engine.runs.run_config import _NotSimpleError, _parse_lines, default_values, parse_config, read_changed_config

ALIASES = "\n".join(["a: &x0 [1, 1]", *(f"b{n}: &x{n} [*x{n - 1}, *x{n - 1}]" for n in range(1, 30))])
HOSTILE = {
    "aliases": f"{ALIASES}\nmodel: {{name: ok, options: {{x: *x29}}}}",
    "code": "model: {name: !!python/object/apply:os.system ['touch /tmp/x']}",
    "tabs": "model:\n\tname: x",
    "binary": "\x00\x01",
    "text": "just text",
    "sections of other types": "model: 5\noptim: [1]\nrun: null",
    "nested": "[" * 20_000,
    "keys that are no text": "model:\n  options:\n    ? [1]\n    : 2",
    "infinity": "optim:\n  lr: .inf",
    "long number": f"run:\n  seed: {'9' * 5000}",
}


def test_changed_config_has_only_values_that_differ_from_defaults(tmp_path: Path) -> None:
    changes = ["optim.name=adamw", "optim.betas=[0.9,0.98]", "schedule.milestones=[1,2]", "precision.amp=bf16"]
    config = resolve_config(None, [*changes, "run.name=x", "model.options={width: 2}"]).config
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(as_stored(config)))
    assert read_changed_config(path) == {
        "model.options": {"width": 2},
        "optim.name": "adamw",
        "optim.betas": [0.9, 0.98],
        "schedule.milestones": [1, 2],
        "precision.amp": "bf16",
    }


def test_written_config_needs_no_yaml_library() -> None:
    text = to_yaml(as_stored(Config()))
    assert _parse_lines(text) == parse_yaml(text)
    assert set(default_values()) >= {"optim.lr", "model.name"}


@given(
    st.dictionaries(
        st.sampled_from(["name", "lr", "x_1"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.just({}),
            st.lists(st.one_of(st.floats(), st.text(max_size=8), st.integers()), max_size=3),
            st.sampled_from(["off", "1e3", "0x1", "null", "~", "1:30", "=", "2026-01-01", "- a", "a: b", "a #b"]),
        ),
    )
)  # fmt: skip
def test_fast_parser_agrees_with_yaml_on_whatever_it_parses(values: dict[str, object]) -> None:
    text = to_yaml({"optim": values})
    try:
        parsed = _parse_lines(text)
    except _NotSimpleError:
        return
    assert repr(parsed) == repr(parse_yaml(text))


@given(st.lists(st.sampled_from(["a:", "b:", "  k: 1", "  k: x", "  j:", "  - 1", "  - 'x'", "", "  l: {}", "x: 1"])))
def test_fast_parser_agrees_with_yaml_on_structure(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        parsed = _parse_lines(text)
    except _NotSimpleError:
        return
    try:
        expected = parse_yaml(text)
    except yaml.YAMLError:
        pytest.fail(f"YAML refuses {text!r}")
    # A section without keys is null.
    assert parsed == {name: values or {} for name, values in (expected or {}).items()}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_config_gives_small_json_or_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    changed = read_changed_config(path)
    assert len(json.dumps(changed, allow_nan=False)) < 10_000


def test_config_that_is_link_or_large_is_not_read(tmp_path: Path) -> None:
    path, link = tmp_path / "config.yaml", tmp_path / "link.yaml"
    path.write_text("optim:\n  lr: 0.3\n")
    link.symlink_to(path)
    assert read_changed_config(path) == {"optim.lr": 0.3} and read_changed_config(link) is None
    path.write_text("#" * (1 << 17))
    assert read_changed_config(path) is None and read_changed_config(tmp_path / "none") is None
    assert parse_config("a: [") is None
