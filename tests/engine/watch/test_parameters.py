"""Parameters of foreign runs: files of trainers, their bounds, and tags of Python objects."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import yaml

from engine.config.yaml_io import compose_yaml, compose_yaml_fast
from engine.watch.parameters import (
    MAX_KEY_LENGTH,
    MAX_PARAMETERS,
    MAX_TEXT_LENGTH,
    Parameters,
    flatten,
    merge_parameters,
    read_parameters,
)

RECORDINGS = Path(__file__).parents[2] / "recordings" / "foreign"
PYTHON_TAGS = """\
optimizer: !!python/object/apply:os.system ["touch {planted}"]
path: !!python/object/apply:pathlib.PosixPath [/, data]
widths: !!python/tuple [8, 16]
args: !!python/object:argparse.Namespace
  lr: 1.0e-05
"""


@pytest.mark.parametrize("name", [".hydra/config.yaml", "args.yaml", "config.yaml", "hparams.yaml"])
def test_read_parameters_flattens_yaml(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("optim: {lr: 1e-3, name: adamw, betas: [0.9, 0.999]}\namp: true\nseed: null\nheads: [{dim: 8}]\n")
    expected = {"optim.lr": 0.001, "optim.name": "adamw", "optim.betas": "[0.9, 0.999]"}
    assert read_parameters(tmp_path) == expected | {"amp": True, "seed": None, "heads.0.dim": 8}


def test_read_parameters_unwraps_config_of_wandb(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "wandb_version: 1\n_wandb: {desc: null, value: {cli_version: 1}}\nlr: {desc: null, value: 0.1}\n"
        "model: {desc: null, value: {name: tiny}}\n"
    )
    assert read_parameters(tmp_path) == {"lr": 0.1, "model.name": "tiny"}


def test_read_parameters_runs_no_python_tag(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    (tmp_path / "hparams.yaml").write_text(PYTHON_TAGS.format(planted=planted))
    found = read_parameters(tmp_path)
    assert found["widths"] == "[8, 16]"
    assert found["args.lr"] == 1e-05
    assert not planted.exists()


ODD_YAML = [
    *(b"", b"\xff", b"[", b"- 1", b"text", b"? [1]\n: 2", b"a: !!int x", b"x: " + b"[" * 9999),
    *(b"a: &a [*a]", b"a: &a {b: *a}", b"a: &a [" + b"*a, " * 999 + b"*a]"),
]


@pytest.mark.parametrize("content", ODD_YAML, ids=range(len(ODD_YAML)))
def test_read_parameters_passes_over_odd_yaml(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    (tmp_path / "args.yaml").write_text("lr: 1\n")
    assert read_parameters(tmp_path)["lr"] == 1


def test_read_parameters_opens_no_pipe_and_follows_no_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    (tmp_path / "args.yaml").symlink_to(RECORDINGS / "lightning/csv/hparams.yaml")
    (tmp_path / ".hydra").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.yaml").write_text("lr: 1\n")
    assert read_parameters(tmp_path) == {}


def test_flatten_bounds_number_length_and_depth() -> None:
    assert len(flatten({str(number): number for number in range(2 * MAX_PARAMETERS)})) == MAX_PARAMETERS
    assert flatten({"k" * (MAX_KEY_LENGTH + 1): 1, "a": "x" * 9999}) == {"a": "x" * MAX_TEXT_LENGTH}
    deep: object = 1
    for _ in range(100):
        deep = {"a": deep}
    assert flatten(deep) == {}
    assert flatten({"big": 10**400, "small": -(10**400), "odd": "\ud800"}) == {
        "big": math.inf,
        "small": -math.inf,
        "odd": "?",
    }


def test_merged_parameters_are_bounded() -> None:
    found: Parameters = {}
    for record in range(4):
        found = merge_parameters(found, {f"{record}.{number}": 1 for number in range(500)})
    assert len(found) == MAX_PARAMETERS
    assert merge_parameters(found, {"0.0": 2})["0.0"] == 2


def test_fast_yaml_has_the_nodes_and_limits_of_a_config() -> None:
    text = "a: &x [1, 2.5, off]\nb: *x\nc: {d: 1e-3, e: 'q', f: true}\ng: |\n  text\n"
    assert yaml.serialize(compose_yaml_fast(text)) == yaml.serialize(compose_yaml(text))  # type: ignore[arg-type]
    repeated = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10) if n else 0}]\n" for n in range(6))
    for large in ("- " * 60, "[" * 100_000, repeated):
        with pytest.raises(yaml.YAMLError):
            compose_yaml_fast(large)
