"""The stored config of a run as changed values, also of hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config.loader import resolve_config
from engine.config.schema import Config, as_stored
from engine.config.yaml_io import to_yaml
from engine.runs.run_config import changed_values, default_values, read_changed_config

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
        "optim.lr": 0.001,
        "optim.betas": [0.9, 0.98],
        "schedule.milestones": [1, 2],
        "precision.amp": "bf16",
    }


def test_default_values_are_those_of_the_schema() -> None:
    assert set(default_values()) >= {"optim.lr", "model.name"}
    assert changed_values(as_stored(Config())) == {}


# The first draw imports the config schema.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(["name", "lr", "x_1"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=12), st.lists(st.text(max_size=8), max_size=3),
            st.sampled_from(["off", "1e3", "0x1", "null", "~", "1:30", "=", "2026-01-01", "- a", "a: b", "a #b"]),
        ),
    )
)  # fmt: skip
def test_stored_config_gives_the_values_that_were_written(values: dict[str, object]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(to_yaml({"optim": values}))
        assert repr(read_changed_config(path)) == repr(changed_values({"optim": values}))


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
    path.write_text("a: [")
    assert read_changed_config(path) is None
