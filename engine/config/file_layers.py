"""Read a config file, and the files and presets in its `base:`, as layers of values, which `engine.config.loader`
merges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from engine.base.errors import Problem, UsageError, did_you_mean, raise_if_any
from engine.base.files import expand_user, is_file, settings_file
from engine.base.trust import foreign_reason
from engine.config.key_names import REMOVED_KEYS, key_hint
from engine.config.schema import UNSTORED_KEYS, sections
from engine.config.yaml_io import read_yaml

ConfigLayer = dict[str, dict[str, Any]]
# Files that each name ten base files can name the same ten files again: their number grows with the power of the depth.
MAX_BASE_FILES = 100


class Layer(NamedTuple):
    """The values that one source sets. `foreign` is why other users can change that file, None if they cannot.
    `removed` are the removed keys of the config of a run, with their values, which are not used."""

    source: str
    values: ConfigLayer
    foreign: str | None = None
    removed: Mapping[str, Any] = MappingProxyType({})


def _read_config_file(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the content of a config file, and why other users can change it."""
    # A config may be a link.
    content, status = read_yaml(path.resolve(), str(path))
    foreign = foreign_reason(status)
    if content is None:
        return {}, foreign
    if not isinstance(content, dict):
        raise UsageError.one(
            str(path), f"must contain sections ({', '.join(sections())}), each with its keys", code="wrong-format"
        )
    return content, foreign


def read_file_layers(path: Path, presets: Mapping[str, Path]) -> list[Layer]:
    """Return the layers of a file, starting with those of its `base:` files. `presets` has the files of the presets."""
    return _read_layers(path, presets, (), itertools.count(1))


def _read_layers(
    path: Path, presets: Mapping[str, Path], chain: tuple[Path, ...], base_numbers: Iterator[int]
) -> list[Layer]:
    """Return the layers of a file that the files of `chain` name; `base_numbers` counts all base files."""
    resolved = path.resolve()
    if resolved in chain:
        cycle = " -> ".join(str(part) for part in (*chain[chain.index(resolved) :], resolved))
        raise UsageError.one(
            "base", f"circular base files: {cycle}; remove one of the `base:` lines", code="invalid-value"
        )
    content, foreign = _read_config_file(path)
    bases = content.pop("base", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UsageError.one(str(path), "base: must be a file name, a preset or a list of them", code="invalid-value")
    layers: list[Layer] = []
    for base in bases:
        base_path = resolved.parent / expand_user(base)
        if not is_file(base_path) and base in presets:
            base_path = presets[base]
        if not is_file(base_path):
            hint = did_you_mean(base, presets)
            reason = f"base file {base} does not exist (resolved to {base_path}), and is no preset{hint}"
            raise UsageError.one(str(path), reason, code="not-found")
        if next(base_numbers) > MAX_BASE_FILES:
            reason = f"names more than {MAX_BASE_FILES} base files, counting those that base files name"
            raise UsageError.one(str((*chain, resolved)[0]), reason, "merge some of them", code="too-many")
        layers += _read_layers(base_path, presets, (*chain, resolved), base_numbers)
    problems = [
        Problem(
            section,
            f"must be a section with keys, not {type(keys).__name__}{key_hint(section)}",
            source=str(path),
            code="invalid-value",
        )
        for section, keys in content.items()
        if keys is not None and not isinstance(keys, dict) and section in sections()
    ]
    values = {section: keys or {} for section, keys in content.items()}
    removed: dict[str, Any] = {}
    is_run_config = path.name == "config.yaml" and is_file(path.parent / "events.jsonl")
    for key, (default, _) in REMOVED_KEYS.items():
        section, _, name = key.partition(".")
        # The user did not write the config of a run.
        if isinstance(keys := values.get(section), dict) and (is_run_config or keys.get(name) == default):
            removed |= {key: value} if (value := keys.pop(name, default)) != default else {}
    for key in UNSTORED_KEYS:
        section, _, name = key.partition(".")
        # `gputrain config --json` prints the empty default, too.
        if isinstance(keys := values.get(section), dict) and keys.pop(name, None):
            reason = f"cannot be set in a config file; set it on the command line or in {settings_file()}"
            problems.append(Problem(key, reason, source=str(path), code="not-supported"))
    raise_if_any(problems)
    return [*layers, Layer(str(path), values, foreign, removed)]
