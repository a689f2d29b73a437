"""Fuzz configs: one is accepted or rejected with a `UsageError`. `tests/fuzz` has the readers of files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.base.errors import UsageError
from engine.config.loader import ResolvedConfig, resolve_config
from engine.config.schema import Config, as_dict, fields, sections
from engine.config.yaml_io import parse_yaml, to_yaml

# Deterministic examples. To try many more:
# GPUTRAIN_FUZZ=20000 pytest --timeout=0 tests/end_to_end/test_fuzz.py
EXAMPLES = int(os.environ.get("GPUTRAIN_FUZZ", "30"))
fuzz = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

KEYS = [key for key, _ in fields()]
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 10**400, 2**63, 1e308, -0.0]))
WORDS = st.one_of(
    st.sampled_from(
        ["", "null", "off", "auto", "~", ".nan", "1e999", "0x10", "1_000", "010", "[", "{", "*a", "!!int x"]
    ),
    st.text(max_size=8),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def check_config(file: str | None, *overrides: str) -> None:
    """An accepted config can be written and read back; a rejected one has a message for each key."""
    try:
        resolved: ResolvedConfig = resolve_config(file, overrides)
    except UsageError as error:
        assert error.problems
        assert all(problem.message for problem in error.problems)
        return
    assert Config.model_validate(parse_yaml(to_yaml(as_dict(resolved.config)))) == resolved.config


@contextmanager
def config_files(**texts: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        for file_name, text in texts.items():
            (Path(name) / f"{file_name}.yaml").write_bytes(text)
        yield Path(name)


YAML_SYNTAX = [
    *(": ", "\n", "\n  ", "- ", "[", "]", "{", "}", ", ", "&a ", "*a", "&a [", "*a, ", "<<: ", "? ", "|\n", ">"),
    *("---\n", "...", "'", '"', "#", "%YAML 1.1\n", "\t", "\x00", "\x85", "="),
    *(f"!!{tag} " for tag in ("float", "timestamp", "bool", "int", "omap", "pairs", "map", "seq", "str", "null")),
    *("!!binary ", "!!set ", "!!python/name:os.system ", "!x ", "2001-01-01", "1:30", "0b1", "0o7"),
]
YAML_PARTS = st.lists(
    st.one_of(
        st.sampled_from([*sections(), *(key.partition(".")[2] for key in KEYS), "base"]),
        st.sampled_from(YAML_SYNTAX),
        SCALARS.map(str),
    ),
    max_size=16,
).map("".join)


@fuzz
@given(st.one_of(YAML_PARTS.map(lambda text: text.encode(errors="surrogatepass")), st.binary(max_size=60)))
def test_resolve_accepts_or_rejects_any_text(text: bytes) -> None:
    with config_files(a=text) as folder:
        check_config(str(folder / "a.yaml"))


SECTIONS = st.dictionaries(
    st.sampled_from([*sections(), "base", "modle"]),
    st.one_of(
        st.dictionaries(st.one_of(st.sampled_from([key.partition(".")[2] for key in KEYS]), WORDS), VALUES, max_size=4),
        VALUES,
    ),
    max_size=4,
)


@fuzz
@given(SECTIONS)
def test_resolve_accepts_or_rejects_any_values(values: dict[str, Any]) -> None:
    with config_files(a=yaml.safe_dump(values).encode()) as folder:
        check_config(str(folder / "a.yaml"))


OVERRIDES = st.one_of(
    st.builds("{}={}".format, st.sampled_from(KEYS), st.one_of(YAML_PARTS, SCALARS, VALUES)),
    st.builds("{}={}".format, WORDS, WORDS),
    st.text(max_size=12),
)


@fuzz
@given(st.lists(OVERRIDES, max_size=4))
def test_resolve_accepts_or_rejects_any_argument(arguments: list[str]) -> None:
    check_config(None, *arguments)


BASES = st.one_of(
    st.lists(st.sampled_from(["a.yaml", "b.yaml", "c.yaml", "./b.yaml", "gone.yaml", ".", "~", "~x", "\0", ""])),
    VALUES,
)


@fuzz
@given(BASES, BASES, BASES, SECTIONS)
def test_resolve_accepts_or_rejects_any_base_chain(a: Any, b: Any, c: Any, values: dict[str, Any]) -> None:
    texts = {
        name: yaml.safe_dump(values | {"base": base}).encode() for name, base in zip("abc", (a, b, c), strict=True)
    }
    with config_files(**texts) as folder:
        check_config(str(folder / "a.yaml"))
