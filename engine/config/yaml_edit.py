"""Set one number in a YAML config file in place: comments, order and layout of the rest stay as they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import yaml

from engine.base.errors import UsageError, file_errors
from engine.base.files import read_bytes, replace_file
from engine.config.loader import find_config, presets, user_presets_folder
from engine.config.yaml_io import MAX_CONFIG_BYTES, compose_yaml, parse_yaml


def editable_config(name: str | None) -> Path:
    """Return the file of a CONFIG argument whose values gputrain may change.

    Raises UsageError without a file, for a preset that is part of gputrain, and for a file that cannot be written."""
    if name is None:
        raise UsageError.one("--set", "needs a CONFIG file to write to; name a YAML file", code="missing-value")
    path = find_config(name)
    if path == presets().get(name) and path.parent != user_presets_folder():
        advice = f"copy it with `gputrain config {name} --diff > my-{name}.yaml`, and use that file"
        raise UsageError.one(
            "--set", f"{name} is a preset of gputrain, which cannot be changed", advice, code="not-writable"
        )
    path = path.resolve()
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise UsageError.one(
            "--set", f"{path} or its folder is not writable for you; use a copy of the file", code="not-writable"
        )
    return path


def set_number(path: Path, key: str, value: float) -> None:
    """Set `section.name` in a config file to a number, atomically.

    Raises UsageError if the file cannot be edited in place; then it is unchanged."""
    by_hand = f"set {key}: {number_text(value)} in it by hand"
    try:
        data = read_bytes(path, MAX_CONFIG_BYTES)
        text = data.decode()
        mode = path.stat().st_mode
        edited = with_number(text, key, value)
    except OSError as error:
        raise UsageError.one(str(path), f"cannot be read: {error.strerror}", code="not-readable") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError.one(str(path), f"{key} cannot be changed in place", by_hand, code="not-supported") from error

    def write(file: BinaryIO) -> None:
        os.fchmod(file.fileno(), mode & 0o7777)
        file.write(edited.encode())

    with file_errors(str(path), "cannot be written", by_hand, code="not-writable"):
        replace_file(path, write, durable=True)


def number_text(value: float) -> str:
    """Return a number that YAML 1.1 and 1.2 read as one: 1e-05 without a point is text in YAML 1.1."""
    mantissa, exponent, power = f"{value:.12g}".partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{power}" if exponent else mantissa


def with_number(text: str, key: str, value: float) -> str:
    """Return YAML text with `section.name` set to a number.

    Raises ValueError if no edit sets this key alone, for example in a section that other sections share by an alias."""
    section, _, name = key.partition(".")
    edited = _edit(text, section, name, number_text(value))
    expected = parse_yaml(text) or {}
    expected[section] = {**(expected.get(section) or {}), name: float(number_text(value))}
    if parse_yaml(edited) != expected:
        raise ValueError(f"{key} cannot be set alone")
    return edited


def _edit(text: str, section: str, name: str, number: str) -> str:
    """Return the text with the value replaced, or with a new line for it. Raises ValueError if it has no place."""
    root = compose_yaml(text)
    values = _find(root, section) if isinstance(root, yaml.MappingNode) else None
    if values is None:
        before = text if not text or text.endswith("\n") else f"{text}\n"
        return f"{before}{section}:\n  {name}: {number}\n"
    if not isinstance(values, yaml.MappingNode):
        raise ValueError("the section has no keys")
    if (current := _find(values, name)) is not None:
        start, end = current.start_mark.index, current.end_mark.index
        # `lr:` without a value ends at its colon.
        return text[:start] + (" " if start == end else "") + number + text[end:]
    if values.flow_style:
        start = values.start_mark.index + 1
        return f"{text[:start]}{name}: {number}{', ' if values.value else ''}{text[start:]}"
    first = values.value[0][0].start_mark
    return f"{text[: first.index]}{name}: {number}\n{' ' * first.column}{text[first.index :]}"


def _find(mapping: yaml.MappingNode, name: str) -> yaml.Node | None:
    return next((value for key, value in mapping.value if key.value == name), None)
